"""Charts: where points are, what is folded, what is escaped."""

import math
import re
from xml.etree import ElementTree

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from diloco_jax.telemetry import svg


def paths(chart):
  """The points of every line of a chart, as lists of (x, y) per piece."""
  found = []
  for d in re.findall(r'<path class="series"[^>]* d="([^"]*)"', chart):
    pieces = [p for p in d.split('M') if p]
    found.append(
      [
        [tuple(map(float, point.split())) for point in piece.split('L')]
        for piece in pieces
      ]
    )
  return found


class SvgTest(parameterized.TestCase):
  def test_points_are_where_they_belong(self):
    chart = svg.line_chart(
      'T', [svg.Series('a', [0, 5, 10], [1.0, 3.0, 2.0])], 'x', 'y'
    )
    ((points,),) = paths(chart)
    left, right = svg.LEFT, svg.WIDTH - svg.RIGHT
    top, bottom = svg.TOP, svg.HEIGHT - svg.BOTTOM
    middle = (left + right) / 2, (top + bottom) / 2
    expected = [(left, bottom), (middle[0], top), (right, middle[1])]
    np.testing.assert_allclose(points, expected, atol=0.051)

  def test_an_axis_from_zero(self):
    for from_zero, share in ((False, 0.0), (True, 0.5)):
      series = [svg.Series('a', [0, 1], [2.0, 4.0])]
      chart = svg.line_chart('T', series, 'x', 'y', from_zero=from_zero)
      (((_, first), _),) = paths(chart)[0]
      bottom = svg.HEIGHT - svg.BOTTOM
      self.assertAlmostEqual(
        first, bottom - share * (bottom - svg.TOP), delta=0.051
      )

  def test_gaps_break_the_line(self):
    chart = svg.line_chart(
      'T',
      [svg.Series('a', range(6), [1, 2, None, math.nan, 3, 4])],
      'x',
      'y',
    )
    self.assertEqual([len(piece) for piece in paths(chart)[0]], [2, 2])

  @parameterized.parameters(('mean', 2.0), ('max', 5.0))
  def test_many_points_are_folded(self, how, expected):
    ys = [1.0, 5.0, 0.0] * svg.POINTS_MAX
    xs, folded = svg._fold(svg.Series('a', range(len(ys)), ys), how)
    self.assertLen(xs, svg.POINTS_MAX)
    np.testing.assert_allclose(folded, expected)
    self.assertEqual(xs[-1], len(ys) - 1)

  def test_folding_leaves_unknown_values_out(self):
    ys = [None, 4.0, math.inf, 2.0] * svg.POINTS_MAX
    _, folded = svg._fold(svg.Series('a', range(len(ys)), ys), 'mean')
    np.testing.assert_allclose(folded, 3.0)
    ys = [None] * (2 * svg.POINTS_MAX)
    for how in ('mean', 'max'):
      _, folded = svg._fold(svg.Series('a', range(len(ys)), ys), how)
      self.assertTrue(np.isnan(folded).all())

  @parameterized.parameters(
    (0, 10, [0, 2, 4, 6, 8, 10]),
    (0.13, 0.31, [0.15, 0.2, 0.25, 0.3]),
    (-3, 3, [-2, 0, 2]),
    (5, 5, [5]),
    (1e9, 2e9, [1e9, 1.2e9, 1.4e9, 1.6e9, 1.8e9, 2e9]),
  )
  def test_ticks_are_round(self, low, high, expected):
    np.testing.assert_allclose(svg.ticks(low, high), expected)

  @parameterized.parameters(
    ([],), ([svg.Series('a', [], [])],), ([svg.Series('a', [1], [None])],)
  )
  def test_nothing_to_draw_is_nothing(self, series):
    self.assertEqual(svg.line_chart('T', series, 'x', 'y'), '')

  def test_one_point_and_a_flat_line_are_drawn(self):
    for series in (
      svg.Series('a', [3], [2.0]),
      svg.Series('a', [1, 2], [2, 2]),
    ):
      chart = svg.line_chart('T', [series], 'x', 'y')
      self.assertIn('class="series"', chart)
      self.assertNotIn('nan', chart)

  def test_names_are_escaped_and_the_picture_is_xml(self):
    chart = svg.line_chart(
      '<t>&"',
      [svg.Series('<s>', [0, 1], [0, 1])],
      '<x>',
      '<y>',
      [svg.Mark(0.5, '<m>'), svg.Mark(7, 'outside')],
    )
    for name in ('s', 'x', 'y', 'm', 't'):
      self.assertNotIn(f'<{name}>', chart)
      self.assertIn(f'&lt;{name}&gt;', chart)
    self.assertNotIn('outside', chart)
    root = ElementTree.fromstring(f'<div>{chart}</div>')
    self.assertLen(root.findall('.//line[@class="mark"]'), 1)

  def test_lines_beyond_the_colours_differ_by_dashes(self):
    styles = {svg._style(k) for k in range(svg.COLOURS * len(svg.DASHES))}
    self.assertLen(styles, svg.COLOURS * len(svg.DASHES))

  def test_shares_in_a_grid(self):
    happened = np.zeros((2, 2 * svg.CELLS_MAX))
    happened[1, ::2] = 1.0
    grid = svg.share_grid('T', ['a', '<b>'], happened, 'merges')
    root = ElementTree.fromstring(grid)
    cells = [x for x in root.iter() if x.get('class') == 'cell']
    self.assertLen(cells, 2 * svg.CELLS_MAX)
    shares = [x.get('fill-opacity') for x in cells]
    self.assertEqual(shares[0], '0.00')
    self.assertEqual(shares[-1], '0.50')
    self.assertEqual(svg.share_grid('T', [], np.zeros((0, 0)), 'x'), '')


if __name__ == '__main__':
  absltest.main()
