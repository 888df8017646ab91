"""One line per mistake, whatever the values hold."""

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax import errors


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (
      errors.Problem('sync.quorum', '9', '0..4', 'raise islands'),
      'sync.quorum: got 9; expected 0..4; raise islands',
    ),
    (
      errors.Problem('--workdir', '', 'a folder', ''),
      '--workdir; expected a folder',
    ),
    (errors.Problem('x', 'a\nb\n c', '', ''), 'x: got a b c'),
  )
  def test_a_problem_is_one_line(self, problem, line):
    self.assertEqual(str(problem), line)

  def test_every_problem_has_its_line(self):
    one = errors.Problem('a', '1', '2', 'do this')
    two = errors.Problem('b', '3', '4', 'do\nthat')
    error = errors.UserError([one, two])
    self.assertEqual(error.problems, (one, two))
    self.assertEqual(
      str(error).split('\n'),
      ['a: got 1; expected 2; do this', 'b: got 3; expected 4; do that'],
    )

  def test_an_error_without_a_problem_is_a_bug(self):
    with self.assertRaises(AssertionError):
      errors.UserError([])


if __name__ == '__main__':
  absltest.main()
