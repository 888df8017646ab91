"""Pieces of a self-contained HTML page: tables, sections, the page itself."""

from collections.abc import Iterable, Sequence
import html
import json
from typing import Any

from diloco_jax.telemetry import svg

STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1b1f24;--soft:#57606a;
--line:#c8ced6;--bad:#b3261e;--panel:#f4f6f8;
--c0:#1f6feb;--c1:#d1600a;--c2:#1a7f4b;--c3:#b3261e;
--c4:#7d4cc9;--c5:#8a5a2b;--c6:#c2338a;--c7:#5b6470}
@media(prefers-color-scheme:dark){:root{--page:#14171b;--ink:#e4e8ed;
--soft:#9aa4b0;--line:#3b434d;--bad:#ff8a80;--panel:#1d2228;
--c0:#6cb0ff;--c1:#ffa657;--c2:#5fd394;--c3:#ff8a80;
--c4:#c2a0ff;--c5:#d9a872;--c6:#ff8fc8;--c7:#a7b0ba}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--page);
color:var(--ink);font:16px/1.45 system-ui,sans-serif}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:2rem}
h3{font-size:1rem;color:var(--soft)}
.charts{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem}
th,td{border-bottom:1px solid var(--line);padding:.25rem .7rem .25rem 0;
text-align:left;vertical-align:top;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:600}
.notice{background:var(--panel);border-left:4px solid var(--bad);
padding:.5rem 1rem}
.legend{font-size:.8rem;color:var(--soft);margin:.2rem 0 0}
summary{cursor:pointer;color:var(--soft)}
"""


def cell_text(value: Any) -> str:
  """A value as escaped text."""
  if value is None:
    return '–'
  if isinstance(value, bool):
    return 'yes' if value else 'no'
  if isinstance(value, float):
    return f'{value:.6g}'
  if isinstance(value, (dict, list)):
    return html.escape(json.dumps(value))
  return html.escape(str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  body = ''.join(
    f'<tr>{"".join(f"<td>{cell_text(cell)}</td>" for cell in row)}</tr>'
    for row in rows
  )
  if not body:
    return ''
  top = ''.join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
  return (
    f'<div class="wide"><table><thead><tr>{top}</tr></thead>'
    f'<tbody>{body}</tbody></table></div>'
  )


def section(title: str, *parts: str) -> str:
  """A section; it says so where there is nothing to show."""
  content = ''.join(parts) or '<p>Nothing was recorded.</p>'
  return f'<section><h2>{html.escape(title)}</h2>{content}</section>'


def charts(*charts: str) -> str:
  shown = ''.join(f'<div>{chart}</div>' for chart in charts if chart)
  return f'<div class="charts">{shown}</div>' if shown else ''


def folded(title: str, content: str) -> str:
  if not content:
    return ''
  return f'<details><summary>{html.escape(title)}</summary>{content}</details>'


def headed(
  title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]
) -> str:
  made = table(head, rows)
  return f'<h3>{html.escape(title)}</h3>{made}' if made else ''


def document(title: str, sections: Sequence[str]) -> str:
  """The whole page; sections are HTML."""
  # The policy lets a browser load nothing and run nothing from this page.
  policy = "default-src 'none'; style-src 'unsafe-inline'"
  head = (
    '<meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    f'<title>{html.escape(title)}</title><style>{STYLE}{svg.STYLE}</style>'
  )
  return (
    f'<!DOCTYPE html><html lang="en"><head>{head}</head>'
    f'<body><h1>{html.escape(title)}</h1>{"".join(sections)}</body></html>\n'
  )
