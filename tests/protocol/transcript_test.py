"""Replays `transcripts/*.txt`.

After a change of the rules, rewrite the files and read the difference:
  REWRITE_TRANSCRIPTS=1 python -m pytest tests/protocol/transcript_test.py
"""

import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tests.protocol import transcript
from tests.protocol.transcript_island import IslandPlayer
from tests.protocol.transcript_syncer import SyncerPlayer

FOLDER = pathlib.Path(__file__).parent / 'transcripts'
REWRITE = bool(os.environ.get('REWRITE_TRANSCRIPTS'))
PLAYERS = {
  'syncer': SyncerPlayer,
  'island': IslandPlayer,
}


def replay(path):
  """Blocks of a file with what the machine answers now."""
  blocks = transcript.parse(path.read_text(encoding='utf-8'))
  player = PLAYERS[path.name.split('_')[0]]()
  return blocks, [player.run(block) for block in blocks]


class TranscriptTest(parameterized.TestCase):
  maxDiff = None

  @parameterized.parameters(*sorted(x.name for x in FOLDER.glob('*.txt')))
  def test_transcript(self, name):
    path = FOLDER / name
    blocks, outputs = replay(path)
    if REWRITE:
      for block, output in zip(blocks, outputs, strict=True):
        block.expected = output
      path.write_text(transcript.render(blocks), encoding='utf-8')
    for block, output in zip(blocks, outputs, strict=True):
      self.assertEqual(block.expected, output, '\n'.join(block.commands))

  def test_files_are_in_the_form_that_rewriting_gives(self):
    for path in sorted(FOLDER.glob('*.txt')):
      text = path.read_text(encoding='utf-8')
      self.assertEqual(
        text, transcript.render(transcript.parse(text)), path.name
      )

  def test_there_are_transcripts_of_both_machines(self):
    names = {x.name.split('_')[0] for x in FOLDER.glob('*.txt')}
    self.assertEqual(names, set(PLAYERS))

  def test_a_wrong_line_is_found(self):
    path = FOLDER / 'syncer_free_round.txt'
    text = path.read_text(encoding='utf-8').replace('all_in', 'empty')
    blocks = transcript.parse(text)
    player = SyncerPlayer()
    outputs = [player.run(block) for block in blocks]
    self.assertNotEqual([x.expected for x in blocks], outputs)


if __name__ == '__main__':
  absltest.main()
