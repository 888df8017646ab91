"""Charts as inline SVG that follow the page's colours, light and dark.

No scripts, no fonts and no files from outside. A chart is drawn for a phone's
width and grows with the page.
"""

from collections.abc import Sequence
import html
import math
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 34
POINTS_MAX = 200  # of a line; more are folded
COLOURS = 8  # classes c0..c7 of the page's style
DASHES = ('', '6 3', '2 3', '8 3 2 3')
CELLS_MAX = 100  # columns of a grid

STYLE = """
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font:10px system-ui,sans-serif}
svg .axis{stroke:var(--line);fill:none}
svg .series{fill:none;stroke-width:1.4;stroke-linejoin:round}
svg .mark{stroke:var(--bad);stroke-dasharray:3 3;stroke-width:1}
svg .cell{fill:var(--c0)}
.key{display:inline-block;width:1.6em;height:.7em;margin:0 .35em 0 0}
.key line{stroke-width:3}
.legend span{white-space:nowrap;margin-right:1em}
"""


class Series(NamedTuple):
  """One line: equal numbers of x and y; None or NaN in y is a gap."""

  name: str
  xs: Sequence[float]
  ys: Sequence[float | None]
  strong: bool = False  # in the text's colour, to stand out from the others


class Mark(NamedTuple):
  """A vertical line, with a name that shows on pointing at it."""

  x: float
  name: str


def _fold(series: Series, how: str) -> tuple[np.ndarray, np.ndarray]:
  """The line with at most POINTS_MAX points, by mean or maximum."""
  xs = np.asarray(series.xs, np.float64)
  ys = np.array([math.nan if y is None else y for y in series.ys], np.float64)
  ys[~np.isfinite(ys)] = math.nan
  if xs.size <= POINTS_MAX:
    return xs, ys
  size = -(-xs.size // POINTS_MAX)
  starts = np.arange(0, xs.size, size)
  if how == 'max':
    folded = np.fmax.reduceat(ys, starts)
  else:
    known = ~np.isnan(ys)
    sums = np.add.reduceat(np.where(known, ys, 0.0), starts)
    counts = np.add.reduceat(known.astype(np.float64), starts)
    folded = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
  return np.maximum.reduceat(xs, starts), folded


def ticks(low: float, high: float, count: int = 5) -> list[float]:
  """About `count` round numbers within [low, high]."""
  if high <= low:
    return [low]
  rough = (high - low) / count
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(
    (k * power for k in (1, 2, 5, 10) if k * power >= rough), 10 * power
  )
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [k * step for k in range(first, last + 1)]


def _number(value: float) -> str:
  if value == 0:
    return '0'
  for limit, letter in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if abs(value) >= limit:
      return f'{value / (1e3 if letter == "k" else limit):.4g}{letter}'
  return f'{value:.4g}'


def _label(text: str, place: str) -> str:
  return f'<text {place} text-anchor="middle">{html.escape(text)}</text>'


class _Frame:
  """From values to places in the picture."""

  def __init__(
    self, x_low: float, x_high: float, y_low: float, y_high: float
  ) -> None:
    if x_high <= x_low:
      x_high = x_low + 1.0
    if y_high <= y_low:
      y_low, y_high = y_low - 0.5, y_high + 0.5
    self.x_range = x_low, x_high
    self.y_range = y_low, y_high

  def x(self, value: float) -> float:
    low, high = self.x_range
    return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

  def y(self, value: float) -> float:
    low, high = self.y_range
    return (
      HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
    )

  def axes(self, x_label: str, y_label: str) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
      f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>',
      _label(x_label, f'x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 4}"'),
      _label(
        y_label,
        f'transform="translate(11 {(TOP + bottom) / 2:.0f}) rotate(-90)"',
      ),
    ]
    for value in ticks(*self.x_range):
      x = self.x(value)
      parts.append(
        f'<path class="axis" d="M{x:.1f} {bottom}v3"/><text x="{x:.1f}"'
        f' y="{bottom + 14}" text-anchor="middle">{_number(value)}</text>'
      )
    for value in ticks(*self.y_range):
      y = self.y(value)
      parts.append(
        f'<path class="axis" d="M{LEFT - 3} {y:.1f}h3"/><text'
        f' x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">'
        f'{_number(value)}</text>'
      )
    return parts


def _style(index: int, strong: bool = False) -> str:
  if strong:
    return 'style="stroke:var(--ink);stroke-width:2"'
  dash = DASHES[index // COLOURS % len(DASHES)]
  dashed = f' stroke-dasharray="{dash}"' if dash else ''
  return f'style="stroke:var(--c{index % COLOURS})"{dashed}'


def _path(frame: _Frame, xs: np.ndarray, ys: np.ndarray) -> str:
  parts, pen = [], 'M'
  for x, y in zip(xs, ys, strict=True):
    if math.isnan(y):
      pen = 'M'
      continue
    parts.append(f'{pen}{frame.x(x):.1f} {frame.y(y):.1f}')
    pen = 'L'
  if len(parts) == 1:  # a single point is seen as a short line
    parts.append('h2')
  return ''.join(parts)


def _open(title: str, height: int) -> str:
  return (
    f'<svg viewBox="0 0 {WIDTH} {height}" role="img"'
    f' aria-label="{html.escape(title)}"><title>{html.escape(title)}</title>'
  )


def line_chart(
  title: str,
  series: Sequence[Series],
  x_label: str,
  y_label: str,
  marks: Sequence[Mark] = (),
  fold: str = 'mean',
  from_zero: bool = False,
) -> str:
  """Lines over one pair of axes, with a legend; '' where there is no point.

  Args:
    title: read out in the place of the picture.
    series: the lines.
    x_label: with unit.
    y_label: with unit.
    marks: vertical lines, drawn where they are within the x axis.
    fold: 'mean' or 'max' of points that are too many to draw.
    from_zero: the y axis begins at 0.
  """
  folded = [(one, *_fold(one, fold)) for one in series]
  folded = [x for x in folded if not np.isnan(x[2]).all()]
  if not folded:
    return ''
  all_x = np.concatenate([xs for _, xs, _ in folded])
  all_y = np.concatenate([ys for _, _, ys in folded])
  low_y = float(np.nanmin(all_y))
  if from_zero:
    low_y = min(0.0, low_y)
  frame = _Frame(
    float(all_x.min()),
    float(all_x.max()),
    low_y,
    float(np.nanmax(all_y)),
  )
  parts = [_open(title, HEIGHT), *frame.axes(x_label, y_label)]
  low, high = frame.x_range
  for mark in marks:
    if low <= mark.x <= high:
      x = frame.x(mark.x)
      parts.append(
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}"'
        f' y2="{HEIGHT - BOTTOM}"><title>{html.escape(mark.name)}</title>'
        '</line>'
      )
  keys = []
  for index, (one, xs, ys) in enumerate(folded):
    style = _style(index, one.strong)
    name = html.escape(one.name)
    path = _path(frame, xs, ys)
    parts.append(
      f'<path class="series" {style} d="{path}"><title>{name}</title></path>'
    )
    keys.append(
      '<span><svg class="key" viewBox="0 0 24 8" aria-hidden="true"><line'
      f' x1="0" x2="24" y1="4" y2="4" {style}/></svg>{name}</span>'
    )
  parts.append('</svg>')
  return f'{"".join(parts)}<p class="legend">{"".join(keys)}</p>'


def share_grid(
  title: str, names: Sequence[str], happened: np.ndarray, x_label: str
) -> str:
  """A row a name; the darker a cell, the more often it happened.

  Args:
    title: read out in the place of the picture.
    names: of the rows.
    happened: f64[rows, columns] in [0, 1]; columns are folded by mean.
    x_label: what the columns are.
  """
  rows, columns = happened.shape
  if not rows or not columns:
    return ''
  size = -(-columns // CELLS_MAX)
  starts = np.arange(0, columns, size)
  counts = np.diff(np.append(starts, columns))
  shares = np.add.reduceat(happened, starts, axis=1) / counts
  line = 14
  height = rows * line + 18
  width = (WIDTH - LEFT - RIGHT) / starts.size
  parts = [_open(title, height)]
  for row, name in enumerate(names):
    y = row * line
    parts.append(
      f'<text x="{LEFT - 5}" y="{y + 10}" text-anchor="end">'
      f'{html.escape(name)}</text>'
    )
    parts.extend(
      f'<rect class="cell" x="{LEFT + column * width:.1f}" y="{y + 1}"'
      f' width="{width:.2f}" height="{line - 2}"'
      f' fill-opacity="{share:.2f}"/>'
      for column, share in enumerate(shares[row])
    )
  middle = f'x="{(LEFT + WIDTH) / 2:.0f}" y="{height - 4}"'
  parts.append(_label(x_label, middle) + '</svg>')
  return ''.join(parts)
