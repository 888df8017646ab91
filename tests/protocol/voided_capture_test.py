"""Captures that a Start voids: given or not, no step enters Θ twice (`each`)."""

from absl.testing import absltest
from absl.testing import parameterized

from tests.protocol import chaos_test
from tests.protocol import transcript
from tests.protocol.transcript_island import IslandPlayer


class ClosedCaptureTest(parameterized.TestCase):
  """Rule 5.11: a step enters Θ at most once."""

  def play(self, text):
    player = IslandPlayer()
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    return player, player.run(transcript.Block([], lines, []))

  JOINED = """
    island sizes=1 period=2 overlap=1 mode=each adopt=rebase
    found
    welcome
    broadcast p0 v0
    staged p0
    begin
    boundary 1
    boundary 2
    encoded p0
  """

  def test_a_voided_capture_is_not_given(self):
    # A report on its way when the syncer sends Start says captured_slot=0, so
    # slot 0 opens and is pulled. The island still gives the capture that the
    # Start voided, then drops it when it captures slot 0 anew: c1 is merged,
    # the version that names it finds it gone.
    _, out = self.play(
      self.JOINED
      + """
      begin slot=0
      pull r5 p0 slot=0
      """
    )
    self.assertFalse(any('Contribution' in x for x in out), out)

  def test_a_given_capture_is_kept_when_its_slot_is_captured_anew(self):
    # The same, but the pull overtakes the Start: c1 is given before it is
    # voided. It must be kept until a version or a later pull settles it.
    player, _ = self.play(
      self.JOINED
      + """
      pull r5 p0 slot=0
      begin slot=0
      boundary 3
      boundary 4
      broadcast p0 v1 round=r5 slot=0 named=c1
      staged p0
      boundary 5
      """
    )
    # Steps 3, 4 and 5 are pending; 1 and 2 are in v1.
    self.assertEqual(player.state.boundary - player.state.held[0].step0, 3)

  @parameterized.parameters(3, 5, 27, 73)
  def test_seed(self, seed):
    chaos_test.run_seed(seed, 'each')


if __name__ == '__main__':
  absltest.main()
