"""The settings as rules see them, and the tables that most rules are a line of.

A line is the text of the error, and when it is one. In the text of any rule `{ep}` is `ep 2` and `{=ep}` is `2`.
`{!a|b}` is each of these settings that the user gave, `{?a|b}` each that differs from its default: one error for each, none
without.
"""

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
    """Every setting by its name, with what sections derive from theirs; `see` makes one."""

    run: RunConfig
    """The same, for functions that take a RunConfig."""
    explicit: frozenset[str]
    """Settings that the user gave."""

    def uses(self, name: str) -> bool:
        """It is not turned off."""
        value = getattr(self, name)
        return value is not None and value is not False

    def gives(self, name: str) -> bool:
        """The user gave it, and not to turn it off."""
        return name in self.explicit and self.uses(name)


def see(config: RunConfig, explicit: frozenset[str] = frozenset(), wrong: Collection[str] = ()) -> Settings:
    """The settings for rules; to read one of `wrong` raises Reported."""

    seen: Settings = object.__new__(_seen_without(frozenset(wrong)))
    vars(seen).update(values_of(config), explicit=explicit)
    vars(seen)["run"] = RunConfig(**dict.fromkeys(sections(), seen))
    return seen


@cache
def _seen_without(wrong: frozenset[str]) -> type[Settings]:
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
        *("rope_mscale", "rope_mscale_all_dim"),
        *(name for name in settings() if name.startswith("moe_")),
    }
)
"""Settings that scripts of Megatron-LM give where they have no effect, as it allows: said, and ignored."""


class Plain(str):
    """The text of a rule with a word of the user's in it: braces there name no setting."""


Check = Callable[[Settings], Findings]
"""A rule; what it yields is wrong."""
_NAMED = re.compile(r"\{([=!?]?)([\w|]+)\}")


def _value(c: Settings, name: str) -> str:
    value = getattr(c, name)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ("," if isinstance(next(iter(value), None), int) else " ").join(map(str, value))
    return str(value)


def say(c: Settings, text: str) -> str:
    """A text with its settings: `recompute_modules mlp moe`, `ep 2`, and for a switch its name alone."""
    if isinstance(text, Plain):
        return text

    def shown(found: re.Match[str]) -> str:
        if not hasattr(c, found[2]):
            return found[0]  # braces of a value
        value = _value(c, found[2])
        return value if found[1] else found[2] if value == "True" else f"{found[2]} {value}"

    return _NAMED.sub(shown, text)


def rules(table: Mapping[str, Callable[[Settings], object]]) -> Iterator[Check]:
    """Text of an error -> when it is one."""
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
    """Settings, with | between and a ? before them as for `rules` -> the values of `setting` that they mean something to."""

    def elsewhere(known: tuple[object, ...]) -> Callable[[Settings], bool]:
        return lambda c: getattr(c, setting) not in known

    for names, known in owners.items():
        remedy = f"use --{setting.replace('_', '-')} {known[0]} or remove it"
        marked = names if names.startswith("?") else f"!{names}"
        yield from rules({f"{{{marked}}} has no effect with {{{setting}}}; {remedy}": elsewhere(known)})


def without(table: Mapping[str, str]) -> Iterator[Check]:
    """Settings, marked as for `rules` -> the flag, with a value that works, without which they mean nothing: where that
    setting has its default. (0 may be a value like others: of ema_decay it is.)"""

    def lacks(owner: str) -> Callable[[Settings], bool]:
        return lambda c: getattr(c, owner) == settings()[owner].default

    for names, remedy in table.items():
        owner = remedy.split()[0].removeprefix("--").replace("-", "_")
        # Of a number or a choice the default says more than that it is not given.
        is_off = settings()[owner].default in (None, False)
        lacking = f"without {owner}; add" if is_off else f"with {{{owner}}}; use"
        yield from rules({f"{{{names}}} has no effect {lacking} {remedy} or remove it": lacks(owner)})


def parsed(parse: Callable[[Any], object], name: str) -> Check:
    """What a parser has to say against the value of a setting."""

    def check(c: Settings) -> Findings:
        if getattr(c, name):
            parse(getattr(c, name))
        yield from ()  # a generator: its errors become findings

    return check


def divisors(number: int) -> str:
    """The divisors of a number: `1, 2, 3, 6`."""
    return ", ".join(map(str, divisor_list(number)))


def divisor_list(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def whole_shares(groups: int, ranks: int) -> bool:
    """Each rank has whole key/value heads, or several ranks share one each."""
    return groups % ranks == 0 or ranks % groups == 0


def shares_of_heads(groups: int, *widths: int) -> str:
    """The numbers of ranks that divide all widths, with `whole_shares` of the key/value heads: `1, 2, 4`."""
    return ", ".join(str(ranks) for ranks in divisor_list(math.gcd(*widths)) if whole_shares(groups, ranks))


def multiples(number: int, unit: int, offset: int = 0) -> str:
    """`8 or 12`: offset plus the multiples of `unit` around `number`."""
    below = number // unit * unit
    return f"{below + offset} or {below + unit + offset}" if below else str(unit + offset)
