"""The settings as rules read them, and the tables that define most rules.

A line of a table is the error's text and its condition. In the text of any rule `{ep}` becomes `ep 2` and `{=ep}`
becomes `2`. `{!a|b}` makes one rule for each of these settings that the user gave, `{?a|b}` for each that differs from
its default."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

from megalite.config.compute import ComputeConfig
from megalite.config.data import DataConfig
from megalite.config.describe import sections, settings, values_of
from megalite.config.errors import Findings, Idle, Reported
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import DataParallelConfig, ParallelConfig
from megalite.config.run import RunConfig
from megalite.config.training import CheckpointConfig, LoggingConfig, TrainingConfig


class _Numerics(OptimizerConfig, DataConfig, TrainingConfig, ComputeConfig):
    """Sections of the step."""


class Settings(ModelConfig, ParallelConfig, DataParallelConfig, _Numerics, CheckpointConfig, LoggingConfig):
    """Every setting by its name, with the properties of all sections; built by `rule_settings`."""

    run: RunConfig
    """The same settings, for functions that take a RunConfig."""
    explicit: frozenset[str]
    """Settings that the user gave."""

    def uses(self, name: str) -> bool:
        """Return whether the setting is neither None nor False."""
        value = getattr(self, name)
        return value is not None and value is not False

    def gives(self, name: str) -> bool:
        """Return whether the user gave the setting and did not turn it off."""
        return name in self.explicit and self.uses(name)


def rule_settings(config: RunConfig, explicit: frozenset[str] = frozenset(), wrong: Collection[str] = ()) -> Settings:
    """Build the settings for rules; reading one of `wrong` raises Reported."""

    seen: Settings = object.__new__(_refusing(frozenset(wrong)))
    vars(seen).update(values_of(config), explicit=explicit)
    vars(seen)["run"] = RunConfig(**dict.fromkeys(sections(), seen))
    return seen


@cache
def _refusing(wrong: frozenset[str]) -> type[Settings]:
    def refuse(_: object) -> None:
        raise Reported

    return type("Seen", (Settings,), dict.fromkeys(wrong, property(refuse)))


IDLE = frozenset(
    {
        *("sequence_parallel", "scatter_gather_tensors_in_pipeline", "split", "tiktoken_pattern", "eval_iters"),
        *("data_cache_path", "cp_comm_type", "hierarchical_context_parallel_sizes", "tp_comm_overlap"),
        *("check_replicas_interval", "etp", "rotary_base", "rotary_percent", "load_optimizer", "require_same_schedule"),
        *("attention_backend", "fp8_recipe", "fp8_wgrad", "recompute_method", "recompute_num_layers"),
        *("recompute_modules", "mtp_loss_scaling_factor", "offload_modules", "fp8_param_gather"),
        *("rope_mscale", "rope_mscale_all_dim", "apply_wd_to_qk_layernorm"),
        *(name for name in settings() if name.startswith("moe_")),
    }
)
"""Settings that Megatron-LM scripts give even if they have no effect: they are reported and ignored."""


class Plain(str):
    """Text of a rule that quotes a user's word: its braces name no setting."""


Check = Callable[[Settings], Findings]
"""A rule; it yields what is wrong."""
_NAMED = re.compile(r"\{([=!?]?)([\w|]+)\}")


def _value(c: Settings, name: str) -> str:
    value = getattr(c, name)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ("," if isinstance(next(iter(value), None), int) else " ").join(map(str, value))
    return str(value)


def render(c: Settings, text: str) -> str:
    """Fill in the settings of a text: `recompute_modules mlp moe`, `ep 2`, and for a switch only its name."""
    if isinstance(text, Plain):
        return text

    def shown(found: re.Match[str]) -> str:
        if not hasattr(c, found[2]):
            return found[0]  # braces in a value
        value = _value(c, found[2])
        return value if found[1] else found[2] if value == "True" else f"{found[2]} {value}"

    return _NAMED.sub(shown, text)


def rules(table: Mapping[str, Callable[[Settings], object]]) -> Iterator[Check]:
    """Build rules from the text of an error -> its condition."""
    for text, when in table.items():
        for mark, names in [found for found in _NAMED.findall(text) if found[0] in ("!", "?")] or [("", "")]:
            for name in names.split("|"):
                yield _rule(text.replace(f"{{{mark}{names}}}", f"{{{name}}}"), when, mark, name)


def _rule(text: str, when: Callable[[Settings], object], mark: str, name: str) -> Check:
    idle, default = "has no effect" in text, settings()[name].default if mark else None

    def check(c: Settings) -> Findings:
        differs = bool(mark) and getattr(c, name) != default
        given = c.gives(name) if mark == "!" else differs or not mark
        if (given or (differs and idle and c.uses(name))) and when(c):
            if not given:
                yield Idle("", name)
            else:
                yield Idle(text, name) if idle and name in IDLE else text

    return check


def owned(setting: str, owners: Mapping[str, tuple[object, ...]]) -> Iterator[Check]:
    """Build rules for settings, separated by | and optionally marked ? as for `rules` -> the values of `setting` for
    which they have an effect."""

    def has_no_effect(known: tuple[object, ...]) -> Callable[[Settings], bool]:
        return lambda c: getattr(c, setting) not in known

    for names, known in owners.items():
        remedy = f"use --{setting.replace('_', '-')} {known[0]} or remove it"
        marked = names if names.startswith("?") else f"!{names}"
        yield from rules({f"{{{marked}}} has no effect with {{{setting}}}; {remedy}": has_no_effect(known)})


def without(table: Mapping[str, str]) -> Iterator[Check]:
    """Build rules for settings, marked as for `rules` -> the flag they depend on, with a value that works. They have no
    effect while that flag has its default. (0 may be a normal value, as for ema_decay.)"""

    def lacks(owner: str) -> Callable[[Settings], bool]:
        return lambda c: getattr(c, owner) == settings()[owner].default

    for names, remedy in table.items():
        owner = remedy.split()[0].removeprefix("--").replace("-", "_")
        # The default of a number or choice is a value worth naming.
        is_off = settings()[owner].default in (None, False)
        lacking = f"without {owner}; add" if is_off else f"with {{{owner}}}; use"
        yield from rules({f"{{{names}}} has no effect {lacking} {remedy} or remove it": lacks(owner)})


def parsed(parse: Callable[[Any], object], name: str) -> Check:
    """Build a rule that yields a parser's errors about the value of a setting."""

    def check(c: Settings) -> Findings:
        if getattr(c, name):
            parse(getattr(c, name))
        yield from ()  # a generator: its errors become findings

    return check


def divisors(number: int) -> str:
    """Return the divisors of a number as `1, 2, 3, 6`."""
    return ", ".join(map(str, divisor_list(number)))


def divisor_list(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def whole_shares(groups: int, ranks: int) -> bool:
    """Return whether each rank has whole key/value heads, or several ranks share one each."""
    return groups % ranks == 0 or ranks % groups == 0


def shares_of_heads(groups: int, *widths: int) -> str:
    """Return the numbers of ranks that divide all widths and satisfy `whole_shares`, as `1, 2, 4`."""
    return ", ".join(str(ranks) for ranks in divisor_list(math.gcd(*widths)) if whole_shares(groups, ranks))


def multiples(number: int, unit: int, offset: int = 0) -> str:
    """Return offset plus the multiples of `unit` around `number`, as `8 or 12`."""
    below = number // unit * unit
    return f"{below + offset} or {below + unit + offset}" if below else str(unit + offset)
