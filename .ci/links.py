"""The links of a built site that lead nowhere: one argument, its folder; links to other sites are not followed."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        self.links += [given[name] or "" for name in ("href", "src") if name in given]


root = Path(sys.argv[1]).resolve()
pages = {path: Page(path) for path in root.rglob("*.html")}
lost = []
for path, page in pages.items():
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        has_anchor = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
        if not target.exists() or not has_anchor:
            lost.append(f"{path.relative_to(root)}: {link}")
print(
    f"{sum(len(page.links) for page in pages.values())} links on {len(pages)} pages, {len(lost)} of them lead nowhere"
)
sys.exit("\n".join(lost) or 0)
