"""Links whose text is a file's name show the page's title.

In a clone ``[limits.md](limits.md)`` says which file it leads to. On the site a reader sees pages.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx


def show_titles(app: Sphinx, document: nodes.document) -> None:
    """Drops the text of each link to a page that is the name of the page's file."""
    for link in document.findall(pending_xref):
        name = PurePosixPath(link["reftarget"]).name
        if link.astext() in (name, f"{name}.md"):
            link["refexplicit"] = False


def setup(app: Sphinx) -> dict[str, bool]:
    """Looks at each page that has been read."""
    app.connect("doctree-read", show_titles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
