"""Lines of each package, in the two halves of the README."""

from pages import ROOT

CORE = (
    *("config", "topology", "partition", "tensor_parallel", "context_parallel", "pipeline", "data_parallel"),
    *("models", "kernels", "optimizers", "data", "tokenizers", "checkpoint", "training"),
)
TOOLS = (
    *(
        "preprocess",
        "planner",
        "profiling",
        "sweep",
        "parity",
        "rehearsal",
        "conversion",
        "generation",
        "watchdog",
        "doctor",
        "cli",
    ),
)


def lines(package: str) -> int:
    """Of its Python files."""
    files = (ROOT / "megalite" / package).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def table() -> str:
    """A row for each half: its lines, then each package with its own."""
    rows = []
    for title, packages in (("**The core** trains", CORE), ("**The tools** around it", TOOLS)):
        counts = {package: lines(package) for package in packages}
        listed = ", ".join(f"`{package}` {count:,}" for package, count in counts.items())
        rows.append(f"| {title} | {sum(counts.values()):,} | {listed} |")
    return "\n".join(["| half | lines | packages, with their lines |", "|---|---|---|", *rows]) + "\n"
