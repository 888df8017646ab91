"""The order and the bounds of what waits to be sent."""

import threading
from unittest import mock

from absl.testing import absltest

from diloco_jax.transport import outbox
from tests.transport import ends


def new(queue_max=100, bytes_max=1000):
  return outbox.Outbox(queue_max, bytes_max)


def rest(box):
  box.end()
  return list(box)


class OutboxTest(absltest.TestCase):
  def test_order(self):
    box = new()
    for k, priority in enumerate((1, 0, 1, 0)):
      frames = [b'%d0' % k, b'%d1' % k]
      self.assertTrue(box.put(iter(frames), 1, priority))
    self.assertEqual(
      rest(box),
      [b'10', b'11', b'30', b'31', b'00', b'01', b'20', b'21'],
    )
    self.assertEqual(box.bytes_out, 16)

  def test_a_more_urgent_one_passes_between_pieces(self):
    box = new()
    box.put(iter([b'a', b'b', b'c']), 3, 1)
    self.assertEqual(next(box), b'a')
    box.put(iter([b'x', b'y']), 2, 0)
    box.put(iter([b'd']), 1, 1)
    self.assertEqual(rest(box), [b'x', b'y', b'b', b'c', b'd'])

  def test_one_comes_while_the_last_piece_is_made(self):
    box = new()

    def frames():
      yield b'a'
      box.put(iter([b'x']), 1, 0)

    box.put(frames(), 1, 1)
    self.assertEqual(next(box), b'a')
    self.assertEqual(next(box), b'x')
    self.assertEqual(rest(box), [])

  def test_bounds(self):
    box = new(queue_max=2, bytes_max=10)
    self.assertFalse(box.put(iter([b'a']), 11, 0))
    self.assertTrue(box.put(iter([b'a']), 6, 0))
    self.assertFalse(box.put(iter([b'b']), 5, 0))
    self.assertTrue(box.put(iter([b'c']), 4, 0))
    self.assertFalse(box.put(iter([b'd']), 0, 0))
    self.assertEqual(next(box), b'a')
    self.assertFalse(box.put(iter([b'd']), 0, 0))  # it is still on its way
    self.assertEqual(next(box), b'c')
    self.assertTrue(box.put(iter([b'd']), 6, 0))
    self.assertEqual(rest(box), [b'd'])

  def test_ends_after_what_is_queued_and_takes_no_more(self):
    box = new()
    box.put(iter([b'a']), 1, 0)
    box.end()
    self.assertFalse(box.put(iter([b'b']), 1, 0))
    self.assertEqual(list(box), [b'a'])

  def test_says_that_it_is_the_end(self):
    box = new()
    box.put(iter([b'a']), 1, 0)
    box.end(b'end')
    box.end(b'again')
    self.assertEqual(list(box), [b'a', b'end'])
    self.assertEqual(box.bytes_out, 1)
    box = new()
    box.end(b'end')
    box.close()
    self.assertEqual(list(box), [])

  def test_closes_at_once(self):
    box = new()
    box.put(iter([b'a', b'b']), 1, 0)
    self.assertEqual(next(box), b'a')
    box.close()
    self.assertEqual(list(box), [])
    self.assertFalse(box.put(iter([b'b']), 1, 0))

  def test_waits_and_is_woken(self):
    for stop in (outbox.Outbox.end, outbox.Outbox.close):
      box = new()
      got = []
      thread = threading.Thread(target=lambda b=box, g=got: g.extend(b))
      thread.start()
      stop(box)
      thread.join(ends.TIMEOUT_S)
      self.assertFalse(thread.is_alive())
      self.assertEqual(got, [])

  def test_stalls_only_where_something_waits(self):
    with mock.patch.object(outbox.time, 'monotonic') as clock:
      clock.return_value = 100.0
      box = new()
      clock.return_value = 200.0
      self.assertEqual(box.stalled_s(), 0.0)  # nothing to send
      box.put(iter([b'a', b'b']), 2, 0)
      self.assertEqual(box.stalled_s(), 0.0)
      clock.return_value = 203.0
      self.assertEqual(box.stalled_s(), 3.0)
      next(box)
      self.assertEqual(box.stalled_s(), 0.0)
      clock.return_value = 210.0
      self.assertEqual(box.stalled_s(), 7.0)
      box.close()
      self.assertEqual(box.stalled_s(), 0.0)


if __name__ == '__main__':
  absltest.main()
