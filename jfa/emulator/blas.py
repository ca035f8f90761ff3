"""Holds numpy's BLAS to one thread while a launch runs: threads make small products many times slower."""

import contextlib
import threading

_LOCK = threading.Lock()
_STATE = {"users": 0, "controller": None, "limit": None}


@contextlib.contextmanager
def one_blas_thread():
    """While active in any thread of the process, BLAS uses one thread; then the old limits return."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter():
    with _LOCK:
        _STATE["users"] += 1
        if _STATE["users"] > 1:
            return
        from threadpoolctl import ThreadpoolController

        if _STATE["controller"] is None:
            _STATE["controller"] = ThreadpoolController().select(user_api="blas")
        _STATE["limit"] = _STATE["controller"].limit(limits=1)


def _leave():
    with _LOCK:
        _STATE["users"] -= 1
        if _STATE["users"] == 0:
            _STATE["limit"].restore_original_limits()
            _STATE["limit"] = None
