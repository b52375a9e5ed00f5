"""The exceptions a user can meet. Each message names the value, the limit and the way out."""


class JpagedError(Exception):
    """Base of all errors that jpaged raises on purpose."""


class ConfigError(JpagedError, ValueError):
    """A configuration value is wrong or contradicts another one."""


class CheckpointError(JpagedError, ValueError):
    """A path is no model, or a checkpoint is damaged, incomplete or of an unknown kind."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint's architecture, or a setting inside it, is not implemented."""


class RequestError(JpagedError, ValueError):
    """A request can never be served as asked: an empty prompt, a bad id, a wrong parameter.

    prompt_index: which prompt of a batch it was, where that is known.
    """

    prompt_index: int | None = None


class RequestTooLongError(RequestError):
    """A request can never fit this engine's context length or block pool."""


class EngineClosedError(JpagedError, RuntimeError):
    """The engine was closed and takes no more requests."""


class EngineDeadError(JpagedError, RuntimeError):
    """An engine's thread ended by an error, which is the `__cause__`; so do all its requests."""


class QueueFullError(JpagedError, RuntimeError):
    """As many requests are waiting as the engine was told to keep."""


class NativeUnavailableError(JpagedError, RuntimeError):
    """The C++ kernels can not be had, and why. The XLA forms do the same without them."""
