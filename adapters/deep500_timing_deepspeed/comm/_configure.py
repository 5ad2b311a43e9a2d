"""DeepSpeed's ``configure``: the settings of ``deep500_timing_torch.comm``, and DeepSpeed's config before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deep500_timing_torch.comm import configure as _configure

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEYS = ("enabled", "prof_all", "prof_ops", "verbose", "debug")


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
    **more: Any,
) -> None:
    """Choose the operations to time; a setting that is not given is kept.

    Args:
        deepspeed_config: DeepSpeed's config object, or its JSON as a dictionary with the key ``comms_logger``. An
            object with a disabled logger changes nothing, as in DeepSpeed.
        enabled: See :func:`deep500_timing_torch.comm.configure`, also for the rest.
        prof_all: See there.
        prof_ops: See there.
        verbose: See there.
        debug: See there.
        **more: See there: ``timer``.

    Raises:
        TypeError: ``prof_ops`` is a string, or the first argument is not a config.
    """
    if deepspeed_config is not None:
        _configure(**_settings_of(deepspeed_config))
    _configure(enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug, **more)


def _settings_of(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        found = config.get("comms_logger", config)
        if not isinstance(found, Mapping) or not set(_KEYS).issuperset(found):
            raise TypeError(f"configure({config!r}): of a config's comms_logger {', '.join(sorted(_KEYS))} are known.")
        # As in DeepSpeed's JSON: disabled unless it says otherwise.
        return {"enabled": False, **found}
    found = getattr(config, "comms_config", config)
    if not hasattr(found, "comms_logger_enabled"):
        raise TypeError(
            f"configure({config!r}): the first argument is DeepSpeed's config; say which setting is meant, "
            f"as configure(enabled={bool(config)})."
        )
    if not found.comms_logger_enabled:
        return {}
    return {"enabled": True, **{key: getattr(found.comms_logger, key) for key in _KEYS[1:]}}
