"""A web crawler: each page is a task, which schedules a task for each page that it links to."""

from __future__ import annotations

import re
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import zmqdist as zd

SECTIONS = ("herbs", "shrubs", "trees")
DEPTH = 3


class Site(BaseHTTPRequestHandler):
    """A site whose pages link to three pages below them, and back to the first page."""

    def do_GET(self) -> None:
        names = [part for part in self.path.split("/") if part]
        below = SECTIONS if len(names) < DEPTH else ()
        links = "".join(f'<a href="{self.path.rstrip("/")}/{name}">{name}</a> ' for name in below)
        body = f"<h1>All about {names[-1] if names else 'plants'}</h1> {links}<a href='/'>home</a>"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def crawl(site: str, path: str) -> dict[str, int]:
    """Return how many links the pages at and below this path have."""
    with urllib.request.urlopen(site + path, timeout=10) as reply:
        page = reply.read().decode()
    links = re.findall(r"href=[\"']([^\"']+)", page)
    counts = {path: len(links)}
    # a page that links back to one above it must not be read again
    below = [link for link in dict.fromkeys(links) if link.startswith(path) and link != path]
    coordinator = zd.ClusterCoordinator()  # the cluster that runs this function
    values = [coordinator.submit(crawl, site, link) for link in below]
    for value in coordinator.as_completed(values):
        counts |= value.result()  # while it waits, its slot runs other pages
    return counts


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = f"http://127.0.0.1:{server.server_port}"
    with zd.local_cluster(workers=2) as cluster, cluster.coordinator() as coordinator:
        counts = coordinator.submit(crawl, site, "/").result()
    server.shutdown()
    server.server_close()
    print(f"{len(counts)} pages with {sum(counts.values())} links")
    for path in sorted(counts)[:4]:
        print(f"{counts[path]} links at {path}")


if __name__ == "__main__":
    main()
