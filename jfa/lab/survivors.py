"""Mutants that no schedule gives away, and why each is no fault: {kernel: {key of the mutant: reason}}.

A key is the chain of calls, the statement, and what is wrong with it. The tests fail if a survivor is missing
here, or if one of these is detected.
"""

EXPLAINED = {}
