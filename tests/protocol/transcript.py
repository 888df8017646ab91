"""Reads and replays transcripts: commands, `----`, and what a machine did.

A file holds blocks. A block is one or more commands, a line `----`, and the
expected output up to an empty line; `#` starts a comment. Each command is
fed to one machine as an event; every action it answers with is one line.

Words: `v3` version 3 of syncer incarnation 1, `r2` round 2, `p0` fragment 0,
`0.1` island 0 in its incarnation 1, `c4` capture 4, `#7` payload handle 7.
"""

import dataclasses
import re

from diloco_jax.protocol import actions as a
from diloco_jax.protocol import messages as m
from diloco_jax.protocol.settings import Limits
from diloco_jax.protocol.settings import Settings


@dataclasses.dataclass
class Block:
  """comment: the lines above, as they stand in the file."""

  comment: list[str]
  commands: list[str]
  expected: list[str]


def parse(text):
  """The blocks of a file."""
  blocks = []
  comment, commands, expected = [], [], []
  in_output = False
  for line in [*text.splitlines(), '']:
    if in_output and line:
      expected.append(line)
    elif in_output:
      blocks.append(Block(comment, commands, expected))
      comment, commands, expected = [], [], []
      in_output = False
    elif line == '----':
      assert commands, 'output without a command'
      in_output = True
    elif commands and line:
      commands.append(line)
    elif line.startswith('#') or not line:
      assert not commands, f'no ---- after {commands}'
      comment.append(line)
    else:
      commands.append(line)
  assert not commands, f'no ---- after {commands}'
  return blocks


def render(blocks):
  lines = []
  for block in blocks:
    lines += [*block.comment, *block.commands, '----', *block.expected, '']
  return '\n'.join(lines)


def parse_command(line):
  """'verb x y key=value' -> (verb, [x, y], {key: value})."""
  verb, *rest = line.split()
  words = [x for x in rest if '=' not in x]
  options = dict(x.split('=', 1) for x in rest if '=' in x)
  return verb, words, options


def make_settings(options):
  """Settings from `key=value` words; unknown keys are limits."""
  sizes = tuple(int(x) for x in options.pop('sizes', '1,1').split(','))
  known = {'islands': 1, 'period': 4, 'overlap': 1, 'steps': 40}
  given = {}
  limits = {'standstill_s': 1e9}  # scripts leave out what does not matter
  for key, value in options.items():
    names = {x.name for x in dataclasses.fields(Settings)}
    if value.lstrip('-').isdigit():
      value = int(value)
    elif re.fullmatch(r'-?[0-9.]+', value):
      value = float(value)
    (given if key in names else limits)[key] = value
  return Settings(
    sizes=sizes,
    fingerprint='layout',
    config_hash='config',
    limits=Limits(**limits),
    **{**known, **given},
  )


# How ids are read.


def integer(word, prefix):
  assert re.fullmatch(prefix + r'-?\d+', word), f'{word}: expected {prefix}N'
  return int(word[len(prefix) :])


def version(word):
  if ':' in word:
    incarnation, word = word.split(':')
    return m.Version(int(incarnation), integer(word, 'v'))
  return m.Version(1, integer(word, 'v'))


def versions(word):
  return tuple(version(x) for x in word.split(',')) if word != '-' else ()


def round_id(word):
  if word == '-':
    return None
  incarnation, _, number = word.rpartition(':')
  return m.RoundId(int(incarnation or 1), integer(number, 'r'))


def who(word):
  island, incarnation = word.split('.')
  return int(island), int(incarnation)


# How ids and actions are written.


def number(x):
  return f'{x:.3f}'.rstrip('0').rstrip('.') if isinstance(x, float) else str(x)


def word(x):
  """A value, short."""
  match x:
    case m.Version():
      return f'v{x.merges}' if x.incarnation == 1 else f'{x[0]}:v{x[1]}'
    case m.RoundId():
      return f'r{x.number}' if x.incarnation == 1 else f'{x[0]}:r{x[1]}'
    case m.CaptureId():
      return f'c{x.number}'
    case m.SampleRange():
      return f'from {x.begin}'
    case tuple():
      return '[' + ' '.join(word(y) for y in x) + ']'
    case None:
      return '-'
    case float() | int():
      return number(x)
    case _:
      return str(x)


def fields(x, names, hide=()):
  """'a=1 b=2' for the named fields that are not at a dull value."""
  parts = []
  for name in names:
    value = getattr(x, name)
    if isinstance(value, m.SampleRange) and not value.begin:
      continue
    if (name, value) not in hide:
      parts.append(f'{name}={word(value)}')
  return ' '.join(parts)


DULL = (
  ('slot', -1), ('captured_slot', -1), ('round', None), ('named', None),
  ('drain', False), ('lost_steps', 0), ('rewarm_steps', 0), ('stop_step', -1),
  ('seed_wanted', False), ('step_time_s', 0.0), ('digests', ()),
  ('training', True),
)  # fmt: skip

SHOWN = {
  m.RunConfig: ('config_json', 'config_hash'),
  m.Refusal: ('reason', 'detail'),
  m.Welcome: ('entry', 'versions', 'seed_wanted'),
  m.Start: ('global_step', 'rewarm_steps', 'next_slot', 'stop_step', 'samples'),
  m.Pull: ('slot', 'drain'),
  m.Broadcast: ('version', 'round', 'slot', 'named', 'digest'),
  m.Refused: ('reason',),
  m.Closed: ('slot',),
  m.Lapsed: ('seq',),
  m.Finished: ('reason', 'global_step', 'versions'),
  m.Superseded: (),
  m.Hello: ('step', 'versions'),
  m.Report: (
    'step', 'versions', 'state', 'slot', 'captured_slot', 'lost_steps',
  ),
  m.Contribution: ('capture', 'base', 'c_steps', 'c_tokens'),
  m.Declined: (),
  m.Leave: ('reason',),
  m.Seed: (),
  m.AskAnchors: ('syncer_incarnation',),
  m.Anchors: ('syncer_incarnation', 'versions', 'digests', 'step', 'training'),
  m.AskAnchor: ('version',),
  m.AnchorValue: ('version', 'digest'),
  m.AskDonation: ('recipient',),
  m.Donation: ('recipient', 'step', 'versions'),
}  # fmt: skip


def message(x):
  """One message on one line."""
  parts = [type(x).__name__]
  if getattr(x, 'island', -1) >= 0 and hasattr(x, 'incarnation'):
    parts.append(f'{x.island}.{x.incarnation}')
  if isinstance(x, (m.Pull, m.Contribution, m.Declined, m.Refused)):
    parts.append(word(x.round))
  if hasattr(x, 'fragment'):
    parts.append(f'p{x.fragment}')
  parts.append(fields(x, SHOWN[type(x)], DULL))
  if getattr(x, 'payload', 0):
    parts.append(f'#{x.payload}')
  return ' '.join(x for x in parts if x)


def describe(action):
  """One action on one line; '' for what every transcript would repeat."""
  match action:
    case a.Send():
      return f'{action.peer} <- {message(action.message)}'
    case a.SetTimer():
      if action.name in ('tick', 'report', 'hello'):
        return ''
      return f'timer {action.name} at {number(action.at)}'
    case a.Release():
      return f'release #{action.handle}'
    case a.Note():
      return note(action)
    case a.Stop():
      return f'stop: {action.reason}'
    case a.Inspect():
      return (
        f'inspect {word(action.round)} {action.island}.{action.incarnation}'
        f' #{action.handle}'
      )
    case a.Merge():
      inputs = ', '.join(
        f'{x.island} w={word(x.weight)} #{x.handle}' for x in action.inputs
      )
      return (
        f'merge {word(action.round)} p{action.fragment} {word(action.parent)}'
        f' -> {word(action.version)}: {inputs}'
      )
    case a.WriteTape() if action.key.split(':')[0] in AT_ONCE:
      return ''
    case a.WriteTape():
      line = dict(action.fields)
      if 'inputs' in line:
        line['inputs'] = tuple(x[:6] for x in line['inputs'])
      shown = ('version', 'parent', 'reason', 'inputs', 'left_out')
      words = [f'{x}={word(line[x])}' for x in shown if line.get(x, ()) != ()]
      return ' '.join((f'tape {action.key}', *words))
    case a.StepPlan():
      return plan(action)
    case a.Encode() | a.DropCapture():
      verb = 'encode' if isinstance(action, a.Encode) else 'drop'
      return f'{verb} p{action.fragment} {word(action.capture)}'
    case a.Stage():
      return (
        f'stage p{action.fragment} {word(action.version)} {action.mode}'
        f' base={word(action.base)} add={word(action.capture)}'
        f' #{action.handle}'
      )
    case a.TakeAnchor():
      return (
        f'take p{action.fragment} {word(action.version)} {action.digest}'
        f' #{action.handle}'
      )
    case a.Restore():
      return 'restore ' + ', '.join(
        f'p{x.fragment} {word(x.version)} from {x.source}'
        + (' with momentum' if x.momentum else '')
        for x in action.orders
      )
    case a.SaveSnapshot():
      return f'snapshot {action.number} {word(action.versions)}'
    case a.GiveAnchor():
      return f'give p{action.fragment} {word(action.version)}'
    case a.TakeDonation():
      return f'take donation {action.digest} #{action.handle}'
    case a.Begin():
      return 'begin'
    case a.Export():
      return f'export at {action.global_step}'
    case a.TakeSeeds() | a.GiveSeeds():
      return str(action)
    case _:
      raise TypeError(f'{action!r}')


NOTES = {
  'round_opened': ('members',),
  'round_closed': ('reason', 'contributed', 'left_out', 'grace_s'),
  'lapsed': ('silent_s',),
  'quarantined': ('offences',),
  'draining': ('reason', 'global_step'),
  'finished': ('reason', 'global_step', 'merges'),
  'hello_refused': (),
  'started': ('again',),
  'island_total': (
    'steps', 'trained_token_params', 'merged_token_params',
    'lost_token_params', 'pending_token_params',
  ),
}  # fmt: skip
SILENT = (
  'run_started', 'joined', 'refused', 'welcomed', 'ended', 'slot_skipped',
)  # fmt: skip
# Lines of the tape that are durable at once in transcripts.
AT_ONCE = ('seeded', 'admitted')


def note(action):
  """Only the notes that say more than the actions beside them."""
  if action.kind in SILENT:
    return ''
  values = dict(action.fields)
  parts = ['note', action.kind]
  if 'round' in values:
    parts.append(word(values['round']))
  if 'fragment' in values:
    parts.append(f'p{values["fragment"]}')
  if 'island' in values and 'incarnation' in values:
    parts.append(f'{values["island"]}.{values["incarnation"]}')
  for name in NOTES.get(action.kind, ()):
    if values[name] != ():
      parts.append(f'{name}={word(values[name])}')
  return ' '.join(parts)


def plan(action):
  parts = [f'plan {action.step}:']
  parts += [f'adopt p{x.fragment} {word(x.version)}' for x in action.adopt]
  parts += [f'capture p{x.fragment} {word(x.capture)}' for x in action.capture]
  if action.stop:
    parts.append('stop')
  parts.append('wait' if action.wait else 'step')
  return ' '.join(parts) if not action.stop else ' '.join(parts[:-1])
