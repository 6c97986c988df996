"""The site: ``make docs`` builds it of the repository's own pages, lessons and docstrings.

The folder of sources is the repository itself. So a link from a page to a lesson, to a source file
or to the README is the same on the site as in a clone.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "lightning_dist"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "mathml",
    "page_titles",
]
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "docs/**",
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "build", "docs/_*", "lightning_dist", "recipes", "runs", "tests"]

nb_execution_mode = "off"  # pages show the outputs that are stored
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links name headings as GitHub does

add_module_names = False
autodoc_class_signature = "mixed"
autodoc_inherit_docstrings = False  # Lightning's hooks are documented there
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # attributes are a list, as parameters are
python_maximum_signature_line_length = 80
python_display_short_literal_types = True

html_theme = "furo"
html_title = "lightning_dist"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_top"]  # index.html, which leads to the root page
html_show_copyright = False
html_show_sphinx = False
