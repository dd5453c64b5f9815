"""Choice of settings by the values of their options."""

from collections.abc import Mapping, Sequence
from typing import Any

from ablation.names import short_names
from ablation.schema import to_text
from ablation.settings import Setting
from attention.options import OptionError, nearest
from engine.config.yaml_files import parse_yaml
from engine.runtime.errors import ConfigError, as_config_error


def select(settings: Sequence[Setting], wanted: Mapping[str, Any], key: str) -> list[Setting]:
    """Returns the settings whose runs have all the `wanted` values, option -> value.

    A mapping has a value if it has what the value gives; the name of a mechanism, or of a model, stands for a mapping.

    Raises:
        OptionError: there is none; `key` begins the message.
    """
    found = [*settings]
    for option, value in wanted.items():
        kept = [setting for setting in found if has_value(setting, option, value)]
        if not kept:
            problem = f"{option} = {to_text(value)}: no row has it"
            if texts := sorted({setting.text_of(option) for setting in found} - {""}):
                raise OptionError(key, f"{problem}; rows have {', '.join(texts)}")
            known = {known for setting in settings for known in setting.changes}
            raise OptionError(key, f"{problem}{nearest(option, known)}")
        found = kept
    return found


def has_value(setting: Setting, option: str, value: Any) -> bool:
    """Returns whether the run of a setting has the `value` of an option, of all entries that the option names."""
    if setting.changes.get(option) == to_text(value):
        return True
    held = setting.values_of(option)
    return bool(held) and all(contains(own, value) for own in held)


def contains(held: Any, wanted: Any) -> bool:
    """Returns whether the plain value `held` matches `wanted`, see `select`."""
    if isinstance(held, Mapping):
        asked = wanted if isinstance(wanted, Mapping) else {"name": wanted}
        return all(name in held and contains(held[name], value) for name, value in asked.items())
    if isinstance(held, list) and isinstance(wanted, list):
        return len(held) == len(wanted) and all(map(contains, held, wanted))
    return held == wanted and isinstance(held, bool) == isinstance(wanted, bool)


def select_only(settings: Sequence[Setting], texts: Sequence[str]) -> list[Setting]:
    """Returns the settings that match every ``"OPTION=VALUE"`` of --only; without any, all settings.

    Raises:
        ConfigError: a text of another form, or a value that no row has.
    """
    wanted = {}
    for text in texts:
        option, equals, value = text.partition("=")
        if not option or not equals:
            raise ConfigError(f"--only {text!r}: expected OPTION=VALUE")
        wanted[option] = parse_yaml(value, lambda line, text=text: f"--only {text}").values
    with as_config_error():
        return select(settings, wanted, "--only")


def put_first(settings: Sequence[Setting], baseline: Mapping[str, Any]) -> list[Setting]:
    """Returns the settings with the one that `baseline` names first, as differences are to the first row.

    Raises:
        OptionError: it names none, or several.
    """
    found = select(settings, baseline, "baseline")
    if len(found) > 1:
        names = dict(zip(map(id, settings), short_names(settings), strict=True))
        several = "; ".join(names[id(setting)] for setting in found)
        raise OptionError("baseline", f"{to_text(baseline)} is in {len(found)} rows ({several}); name one of them")
    return [*found, *(setting for setting in settings if setting is not found[0])]
