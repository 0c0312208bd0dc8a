"""`SoftwareStack`: which operations are fused, what hides behind what, and what the host takes to start them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.planner.hardware.reading import FRACTION, OR_ZERO, build, find_file, read_yaml, write_yaml

_FOLDER = Path(__file__).parent / "stacks"


@dataclass(frozen=True, kw_only=True)
class SoftwareStack:
    """One way to run the same model."""

    name: str
    description: str
    fused_attention: bool
    """Scores never reach memory, and the half above the diagonal is not computed (flash attention)."""
    fused_softmax: bool
    """Scale, mask and softmax are one pass over the scores (only without fused attention)."""
    fused_elementwise: bool
    """Bias and activation, and dropout and residual sum, are one pass each."""
    overlap_tensor_parallel: bool
    """Collectives of tensor parallelism run beside the products next to them."""
    overlap_gradients: bool
    """Gradients are summed while the last backward runs, where the config asks for it."""
    half_gradients: bool
    """Gradients are added up and summed over replicas in the precision of activations; else as the config says."""
    scatter_messages: bool
    """A message between stages is cut over tensor-parallel ranks, and put together on the other side."""
    attention_efficiency: float = field(metadata=FRACTION)
    """Of the GEMM efficiency, what fused attention reaches in its products."""
    elementwise_slowdown: float
    """How many times longer the operations on activations between the products take than their bytes at the rate that the
    cluster's memory gives: more than 1 where arithmetic bounds them, or one pass counted is several."""
    operation_seconds: float = field(metadata=OR_ZERO)
    """The host's time to start one operation; a stage takes no less than all of its operations."""
    collective_seconds: float = field(metadata=OR_ZERO)
    """The same of one collective of tensor parallelism over two ranks. Over t it takes t/2 times that: it begins when the
    last of them has started it."""
    microbatch_seconds: float = field(metadata=OR_ZERO)
    """On top of each stage's forward, and of its backward, whatever they hold."""
    step_seconds: float = field(metadata=OR_ZERO)
    """On top of each step: data, norm, scheduler."""
    provenance: Mapping[str, str]
    """Name of a figure -> where it is from."""
    overlap_tensor_gradients: bool = False
    """In the backward, the gradient of a linear layer's input is summed (or scattered) beside the product for the weight's
    gradient."""
    overlap_gathers: bool = False
    """With sequence parallelism, the backward gathers the input once more beside the product for the input's gradient."""
    fused_loss: bool = True
    """The loss reads the logits as they are; else it copies them in fp32 and each step of it is a pass over the copy."""
    softmax_multiple: int = 1
    """The fused softmax takes batches times heads (of a rank) in multiples of this; others go step by step."""
    product_rate: float = 1.0
    """Of the rate of products that the cluster file says, what this stack's libraries reach; more than 1 if that was
    fitted on slower ones."""


_FIGURES = (
    *("attention_efficiency", "elementwise_slowdown", "operation_seconds", "collective_seconds"),
    *("microbatch_seconds", "step_seconds", "product_rate"),
)


def stack_names() -> list[str]:
    """Names of the files that come with megalite, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_stack(name_or_path: str) -> SoftwareStack:
    """A stack by its name or from a file.

    Raises:
        ConfigError: there is none (the nearest names are given), or a field is unknown, missing, of another type or out
            of range, or a figure has no provenance.
    """
    path = find_file(name_or_path, _FOLDER, kind="stack")
    stack = build(SoftwareStack, read_yaml(path, kind="stack"), f"stack file {path}")
    for name in _FIGURES:
        if name not in stack.provenance and not (name == "product_rate" and stack.product_rate == 1.0):
            raise ConfigError(
                f"stack file {path}: provenance: {name} is missing; say where the figure is from, such as measured with "
                f"..., fitted on ..., or assumed"
            )
    for name in stack.provenance:
        if name not in _FIGURES:
            raise ConfigError(
                f"stack file {path}: provenance: unknown name {name} (there are {', '.join(_FIGURES)})"
            )
    return stack


def save_stack(stack: SoftwareStack, path: str | Path) -> None:
    """Write a file that `load_stack` reads back equal.

    Raises:
        ConfigError: it cannot be written.
    """
    write_yaml(stack, path, header="Seconds of the host; what is fused and what overlaps. docs/planner.md")
