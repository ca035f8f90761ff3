"""Turns the source of a @triton.jit function into plain Python that runs against the emulated tl and tlx.

- Decorators and annotations go.
- The body of `with tlx.async_task(...)` becomes a local function that is handed to the enclosing
  `async_tasks`
  object, which runs it as a task. Names that the body assigns and the enclosing function owns are passed in
  by value (Triton's captures).
- An assignment from an allocation tells the allocation the name of its target, for messages; so does one from
  a call
  that may return an aggregate (a ring) holding allocations.
- A while loop counts its turns, so that one that never ends is an error.
- A loop compares the types of what it carries before and after its first turn, as the compiler does.
- `x.value` works on constexprs, which are plain values here.
Line numbers stay those of the original file.
"""

import ast

NAMED = {"local_alloc", "alloc_barriers", "alloc_warp_barrier", "storage_alias_spec"}

COMPILER_KEYWORDS = {"_semantic", "_generator", "_builder"}  # library helpers pass the compiler on


def callee(node):
    """Name of the called function or method, or None."""
    func = node.func if isinstance(node, ast.Call) else None
    if isinstance(func, ast.Attribute):
        return func.attr
    return func.id if isinstance(func, ast.Name) else None


def stored_names(nodes):
    """Names that the statements assign."""
    found = set()
    for node in nodes:
        for x in ast.walk(node):
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                found.add(x.id)
    return found


def mark_carried(block, visible=frozenset()):
    """Gives every loop of a block `carried`: names that it assigns and that the compiler knows before it.

    What is first assigned inside a loop or a branch is unknown behind it, though Python remembers it.
    """
    visible = set(visible)
    for statement in block:
        inner = visible
        if isinstance(statement, ast.FunctionDef):
            inner = {arg.arg for arg in statement.args.args}
        elif isinstance(statement, (ast.For, ast.While)):
            target = stored_names([statement.target]) if isinstance(statement, ast.For) else set()
            statement.carried = (stored_names(statement.body) & visible) - target
            inner = visible | target
        elif not isinstance(statement, (ast.If, ast.With)):
            visible |= stored_names([statement])
            continue
        for field in ("body", "orelse"):
            mark_carried(getattr(statement, field, []), inner)


def _call(name, *args):
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


class Rewriter(ast.NodeTransformer):
    """Rewrites one function; see the module docstring."""

    def __init__(self, first_line=1):
        self.first_line = first_line
        self.tasks = 0
        self.loops = 0
        self.outer = set()

    def visit_FunctionDef(self, node):
        node.decorator_list = []
        node.returns = None
        args = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        for arg in args + [a for a in (node.args.vararg, node.args.kwarg) if a is not None]:
            arg.annotation = None
        self.outer = {arg.arg for arg in args} | stored_names(node.body)
        self.generic_visit(node)
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        if len(node.targets) != 1:
            return node
        target = node.targets[0]
        if isinstance(target, ast.Name):
            node.value = self.name_value(target.id, node.value)
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts)
            if len(target.elts) == len(node.value.elts):
                node.value.elts = [
                    self.name_value(t.id, v) if isinstance(t, ast.Name) else v for t, v in pairs
                ]
        return node

    def name_value(self, name, value):
        if callee(value) in NAMED:
            return ast.BoolOp(ast.Or(), [_call("__setname", ast.Constant(name)), value])
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            return _call("__label", ast.Constant(name), _call("__before"), value)
        if isinstance(value, ast.Tuple) and any(isinstance(v, ast.Call) for v in value.elts):
            return _call("__label", ast.Constant(name), _call("__before"), value)
        return value

    def visit_AnnAssign(self, node):
        if node.value is None:
            return None
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_While(self, node):
        self.generic_visit(node)
        self.loops += 1
        name = f"__turn_{self.loops}"
        start = ast.parse(f"{name} = __turns()").body[0]
        node.body.insert(0, ast.copy_location(ast.Expr(_call(name)), node))
        return [ast.copy_location(start, node), *self.watch_types(node)]

    def visit_For(self, node):
        self.generic_visit(node)
        if callee(node.iter) != "range":  # static_range and tuples are unrolled: a name may change its type
            return node
        self.loops += 1
        return self.watch_types(node)

    def watch_types(self, loop):
        """The loop with a look at the types of what it carries, before it and after its first turn."""
        name = f"__types_{self.loops}"
        if not getattr(loop, "carried", None):
            return [loop]
        before = ast.parse(f"{name} = __types(locals(), {sorted(loop.carried)!r})").body[0]
        after = ast.parse(f"{name} = {name} and {name}(locals())").body[0]
        loop.body.append(ast.copy_location(after, loop.body[-1]))
        return [ast.copy_location(before, loop), loop]

    def visit_Call(self, node):
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if k.arg not in COMPILER_KEYWORDS]
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "value" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(_call("__value", node.value), node)
        return node

    def visit_With(self, node):
        kind = callee(node.items[0].context_expr)
        if kind == "async_tasks":
            node.items[0].optional_vars = ast.Name("__tasks", ast.Store())
        elif kind == "async_task":
            return self.task_function(node)
        self.generic_visit(node)
        return node

    def task_function(self, node):
        """Turns `with async_task(...)` into a function, and a call of `__tasks.add` that hands it over."""
        self.tasks += 1
        captured = sorted(stored_names(node.body) & self.outer)
        body = []
        for statement in node.body:
            new = self.visit(statement)
            if new is not None:
                body.extend(new if isinstance(new, list) else [new])
        name = f"__task_{self.tasks}"
        head = [ast.parse(f"if {n!r} in __captured: {n} = __captured[{n!r}]").body[0] for n in captured]
        function = ast.parse(f"def {name}(__replica, __captured=dict(locals())): pass").body[0]
        function.body = head + (body or [ast.Pass()])
        line = node.lineno + self.first_line - 1
        add = ast.parse(f"__tasks.add(0, {name}, {line})").body[0]
        add.value.args[0] = node.items[0].context_expr
        for new in head + [function, add]:
            ast.copy_location(new, node)
        return [function, add]


def rewrite(source, first_line):
    """The rewritten syntax tree of a function's source, whose first line is `first_line` of its file."""
    tree = ast.parse(source)
    mark_carried(tree.body)
    tree = Rewriter(first_line).visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first_line - 1)
    return tree
