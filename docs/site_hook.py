"""A hook of mkdocs: pages and data that lie outside docs/ are part of the site, and links to them lead there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
FOLDERS = ("examples", "benchmarks/results")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages and data files of the repository's other folders."""
    outside = [ROOT / name for name in PAGES]
    outside += [path for folder in FOLDERS for path in (ROOT / folder).iterdir() if path.is_file()]
    for path in outside:
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links relative to the site's root folder instead of the repository's."""
    source = page.file.src_uri
    if source in PAGES:
        return re.sub(
            r"\]\((?:docs/|README\.md)", lambda match: "](index.md" if "README" in match[0] else "](", markdown
        )
    root = "../" * (source.count("/") + 1)  # of the repository, from this page
    return re.sub(rf"\]\({re.escape(root)}(?!\.\.)", "](" + root[3:], markdown)
