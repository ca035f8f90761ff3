"""Exceptions of the emulator; all derive from EmulationError."""


class EmulationError(Exception):
    """The emulated kernel cannot go on; `findings` holds what was found until then (may be empty)."""

    def __init__(self, message, findings=()):
        super().__init__(message)
        self.findings = list(findings)


class DeadlockError(EmulationError):
    """No task can run and no asynchronous operation is in flight; `findings` has one entry a waiting task."""


class CapacityError(EmulationError):
    """An allocation exceeds what one CTA can have of tensor memory or shared memory."""


class EndlessError(EmulationError):
    """A loop of the kernel, or the whole launch, takes more turns than any that ends."""


class UnknownConstruct(EmulationError, NotImplementedError):
    """A construct that the emulator does not know; the launch adds the kernel's line to the message."""
