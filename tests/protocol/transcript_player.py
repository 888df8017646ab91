"""What the players of both machines share."""

from tests.protocol import transcript as t


class Player:
  """Keeps one machine, and a clock that commands move."""

  def __init__(self):
    self.now = 0.0
    self.state = None
    self.output = []

  def run(self, block):
    """The output lines of a block."""
    self.output = []
    for line in block.commands:
      verb, words, options = t.parse_command(line)
      if 'round' in options:  # a word of Python's own
        options['made_by'] = options.pop('round')
      verbs = self.verbs()
      assert verb in verbs, f'{verb}: expected one of {sorted(verbs)}'
      verbs[verb](*words, **options)
    return self.output

  def at(self, now):
    self.now = float(now)

  def show(self, actions):
    self.output += [x for x in map(t.describe, actions) if x]

  def feed(self, event):
    raise NotImplementedError
