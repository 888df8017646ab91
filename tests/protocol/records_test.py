"""Strict decoding: what was recorded comes back, anything else is refused."""

import dataclasses
import json
import types
import typing

from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st

from diloco_jax.protocol import messages as m
from diloco_jax.protocol import records

# The same examples each time, and no data base of them on disk.
SETTINGS = hypothesis.settings(
  derandomize=True, database=None, deadline=None, max_examples=100
)
INTEGERS = st.integers(-(1 << 62), 1 << 62)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def values_of(hint):
  """Values that an annotation allows."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return st.one_of(*(values_of(x) for x in args))
  if origin is tuple:
    if len(args) == 2 and args[1] is Ellipsis:
      return st.lists(values_of(args[0]), max_size=3).map(tuple)
    return st.tuples(*(values_of(x) for x in args))
  if isinstance(hint, type) and issubclass(hint, tuple):
    fields = typing.get_type_hints(hint).values()
    return st.tuples(*(values_of(x) for x in fields)).map(lambda x: hint(*x))
  return {
    int: INTEGERS, float: FLOATS, bool: st.booleans(), str: st.text(max_size=9),
    type(None): st.none(),
  }[hint]  # fmt: skip


def messages_of(cls):
  hints = typing.get_type_hints(cls)
  return st.builds(cls, **{name: values_of(x) for name, x in hints.items()})


MESSAGES = st.sampled_from(sorted(m.MESSAGES)).flatmap(
  lambda name: messages_of(m.MESSAGES[name])
)
# What a JSON parser can hand over, integers of any size and NaN included.
SCALARS = (
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
)
JSON = st.recursive(
  SCALARS,
  lambda x: (
    st.lists(x, max_size=4)
    | st.dictionaries(st.text(max_size=4), x, max_size=3)
  ),
  max_leaves=8,
)

HELLO = m.Hello(
  protocol_version=1, role='island', island=0, nonce='n', fingerprint='f',
  config_hash='c', versions=(m.Version(1, 2),),
)  # fmt: skip
REPORT = m.Report(
  island=0, incarnation=1, seq=1, step=1, tokens=1, step_time_s=1.0,
  versions=(m.Version(1, 2),),
)  # fmt: skip


class RoundTripTest(absltest.TestCase):
  @SETTINGS
  @hypothesis.given(MESSAGES)
  def test_through_json(self, message):
    text = json.dumps(records.to_plain(message))
    back = records.message_from_plain(json.loads(text))
    self.assertEqual(back, message)
    self.assertIs(type(back), type(message))
    # Also the types inside: an equal tuple is not a Version.
    self.assertEqual(repr(back), repr(message))

  def test_every_message_is_covered(self):
    for name, cls in m.MESSAGES.items():
      with self.subTest(name):
        self.assertTrue(dataclasses.is_dataclass(cls))
        self.assertIn(cls, (*m.TO_SYNCER, *m.TO_ISLAND))
    self.assertEqual(set(m.MESSAGES.values()), set(m.Message.__args__))

  def test_an_integer_is_a_number(self):
    plain = {**records.to_plain(REPORT), 'step_time_s': 2}
    back = records.message_from_plain(plain)
    self.assertIs(type(back.step_time_s), float)

  def test_unknown_things_cannot_be_recorded(self):
    for value in (object(), {1}, {'a': 1}, b'x', 1j):
      with self.subTest(repr(value)), self.assertRaises(TypeError):
        records.to_plain(value)


class HostileTest(parameterized.TestCase):
  def assertOnlyMalformed(self, plain):
    """A message, or MalformedError; nothing else comes out."""
    try:
      message = records.message_from_plain(plain)
    except records.MalformedError:
      return
    self.assertIn(type(message), m.MESSAGES.values())
    json.dumps(records.to_plain(message), allow_nan=False)

  @SETTINGS
  @hypothesis.given(JSON)
  def test_anything(self, plain):
    self.assertOnlyMalformed(plain)

  @SETTINGS
  @hypothesis.given(st.sampled_from(sorted(m.MESSAGES)), JSON)
  def test_anything_under_a_name(self, name, plain):
    fields = plain if isinstance(plain, dict) else {}
    self.assertOnlyMalformed({**fields, '_': name})

  @SETTINGS
  @hypothesis.given(MESSAGES, st.data())
  def test_one_field_replaced(self, message, data):
    plain = records.to_plain(message)
    key = data.draw(st.sampled_from(sorted(plain)))
    # Integers that a float cannot hold are a test of their own.
    plain[key] = data.draw(JSON.filter(is_moderate))
    self.assertOnlyMalformed(plain)

  @SETTINGS
  @hypothesis.given(MESSAGES, st.data())
  def test_a_field_more_or_less(self, message, data):
    plain = records.to_plain(message)
    key = data.draw(st.sampled_from(sorted(plain)))
    missing = {k: v for k, v in plain.items() if k != key}
    with self.assertRaises(records.MalformedError):
      records.message_from_plain(missing)
    with self.assertRaises(records.MalformedError):
      records.message_from_plain({**plain, 'x' + key: 1})

  @parameterized.parameters(
    ({'island': True},),  # a bool is no integer
    ({'island': 1.0},),
    ({'island': None},),
    ({'island': '1'},),
    ({'island': (1 << 62) + 1},),
    ({'step_time_s': float('nan')},),
    ({'step_time_s': float('inf')},),
    ({'step_time_s': True},),
    ({'step_time_s': '1'},),
    ({'healthy': 1},),
    ({'state': 3},),
    ({'state': 'x' * (records.LENGTH_MAX + 1)},),
    ({'versions': [[1]]},),
    ({'versions': [[1, 2, 3]]},),
    ({'versions': [1, 2]},),
    ({'versions': {'incarnation': 1, 'merges': 2}},),
    ({'versions': 'ab'},),
    ({'versions': [[0, 0]] * (records.LENGTH_MAX + 1)},),
    ({'loss': 'low'},),
    ({'_': 'Version'},),  # not a message, though of the same module
    ({'_': 'Report.__init__'},),
    ({'_': None},),
    ({'_': ['Report']},),
  )
  def test_refused(self, changes):
    plain = {**records.to_plain(REPORT), **changes}
    with self.assertRaises(records.MalformedError):
      records.message_from_plain(plain)

  @parameterized.parameters((None,), ([],), ('Report',), (3,), ({},))
  def test_not_a_message(self, plain):
    with self.assertRaises(records.MalformedError):
      records.message_from_plain(plain)

  def test_it_says_where(self):
    plain = records.to_plain(HELLO)
    plain['versions'] = [[1, 2], [1, 'x']]
    with self.assertRaisesRegex(
      records.MalformedError, r'Hello\.versions\.merges: expected int'
    ):
      records.message_from_plain(plain)

  def test_a_message_is_not_an_error_of_the_program(self):
    self.assertTrue(issubclass(records.MalformedError, ValueError))


def is_moderate(value):
  """Whether all integers in it fit into a float."""
  if isinstance(value, dict):
    return all(map(is_moderate, value.values()))
  if isinstance(value, list):
    return all(map(is_moderate, value))
  return not isinstance(value, int) or abs(value) < 1 << 1000


if __name__ == '__main__':
  absltest.main()
