"""What the site has beside the pages: README.md as its home, and the reference of what docs/api.md imports, from docstrings."""

import ast
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
REFERENCE = "reference.md"

Named = ast.ClassDef | ast.FunctionDef


def on_files(files: Any, config: Any) -> Any:
    """Add the page that is in no file."""
    files.append(File.generated(config, REFERENCE, content="\n".join(_reference())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The home page is the README with the list of all pages behind it; the page of entry points leads to the reference."""
    if page.file.src_uri == "api.md":
        return f"{markdown}\n\n[The reference]({REFERENCE}) has the docstrings of all that this page imports.\n"
    if page.file.src_uri != "index.md":
        return markdown
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]*)\]\(([^)]+)\)", _of_site, readme) + markdown[markdown.index("<!-- table: pages -->") :]


def _of_site(link: re.Match[str]) -> str:
    """A link of the README: into docs/, elsewhere, or to a file that the site has not."""
    text, target = link[1], link[2]
    if target.startswith("docs/"):
        return f"[{text}]({target.removeprefix('docs/')})"
    return link[0] if "://" in target else text


def _reference() -> Iterator[str]:
    yield "# Reference\n\nWhat [the entry points](api.md) import, from the docstrings."
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"^from (megalite\.[\w.]+) import (\w+)", page, re.MULTILINE)))
    for module in dict.fromkeys(module for module, _ in names):
        yield f"\n## `{module.removeprefix('megalite.')}`\n"
        file = (ROOT / module.replace(".", "/")).with_suffix(".py")
        tree = ast.parse(file.read_text(encoding="utf-8"))
        yield cleandoc(ast.get_docstring(tree) or "")
        wanted = {name for of, name in names if of == module}
        for node in tree.body:
            if isinstance(node, Named) and node.name in wanted:
                yield from _entry(node, "###")
                for inner in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        yield from _entry(inner, "####")


def _entry(node: Named, level: str) -> Iterator[str]:
    yield f"\n{level} `{node.name}`\n"
    if isinstance(node, ast.FunctionDef):
        answer = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield f"```python\n{node.name}({ast.unparse(node.args)}){answer}\n```\n"
    said = cleandoc(ast.get_docstring(node) or "")
    yield re.sub(r"^(Args|Raises|Collectives|Returns):$", r"**\1**\n", said, flags=re.MULTILINE)
