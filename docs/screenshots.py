"""Screenshots of every page of the docs site, to be looked at; pages wider than the screen fail.

    make docs && .venv/bin/pip install --group screenshots
    .venv/bin/python docs/screenshots.py OUT [--only start] [--chromium /usr/bin/chromium]

OUT gets PAGE-SCREEN-PALETTE.png: desktop (1280) and phone (390), light and dark. Requests to any
other host fail, and are an error: the site must work without a network.
"""

import argparse
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).parents[1] / "site"
SCREENS = {"desktop": (1280, 800), "phone": (390, 844)}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def problems_of(page: Page, width: int) -> list[str]:
    """What is wider than the screen, or an image that did not load."""
    found = []
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        found.append(f"the page is {wide} wide")
    for name in page.evaluate(
        "[...document.images].filter(i => i.complete && !i.naturalWidth && i.offsetParent)"
        ".map(i => i.src)"
    ):
        found.append(f"{name} did not load")
    return found


def main() -> None:
    """Take the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="pages whose path contains this")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    handler = partial(_Quiet, directory=str(SITE))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    paths = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    problems: list[str] = []
    asked: set[str] = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=args.chromium,
            args=["--no-sandbox", "--disable-gpu"],
        )
        for screen, (width, height) in SCREENS.items():
            for palette in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme=palette,
                )
                page = context.new_page()
                page.on("request", lambda request: asked.add(request.url))
                for path in paths:
                    if args.only not in path:
                        continue
                    name = path.removesuffix(".html").replace("/", "_")
                    where = f"{name}-{screen}-{palette}"
                    page.goto(f"{address}/{path}")
                    page.wait_for_timeout(150)
                    problems += [f"{where}: {what}" for what in problems_of(page, width)]
                    page.screenshot(path=args.out / f"{where}.png", full_page=True)
                context.close()
        browser.close()
    elsewhere = (url for url in sorted(asked) if not url.startswith((address, "data:", "blob:")))
    problems += [f"asks for {url}" for url in elsewhere]
    print("\n".join(problems) or f"{len(paths)} pages without a problem")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
