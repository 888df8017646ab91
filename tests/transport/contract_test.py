"""What both transports promise."""

import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from diloco_jax.transport import base
from diloco_jax.transport import grpc_client
from diloco_jax.transport import grpc_server
from tests.transport import ends

UP = base.PeerUp(base.SYNCER)


class Contract(parameterized.TestCase):
  """Runs over each transport below."""

  transport = None

  def setUp(self):
    super().setUp()
    before = set(threading.enumerate())
    # A close that waits for its limit is one that hangs, and fails.
    for module in (grpc_client, grpc_server):
      self.enter_context(mock.patch.object(module, 'CLOSE_S', 600.0))
    self.addCleanup(self._no_thread_is_left, before)

  def _no_thread_is_left(self, before):
    for thread in set(threading.enumerate()) - before:
      thread.join(ends.TIMEOUT_S)
      self.assertFalse(thread.is_alive(), thread.name)

  def start(self, **options):
    """Server, name of the client there, client."""
    run = self.transport(base.TransportOptions(**options))
    self.addCleanup(ends.in_thread, run.server.close)
    client = self.connect(run)
    self.run_ = run
    return run.server, ends.one(run.server, base.PeerUp).peer, client

  def connect(self, run):
    client = run.connect()
    self.addCleanup(ends.in_thread, client.close)
    self.assertEqual(ends.one(client, base.PeerUp), UP)
    return client

  def test_delivers_both_ways(self):
    server, name, client = self.start()
    self.assertTrue(client.send(base.SYNCER, ends.report(3, loss=1.5)))
    self.assertEqual(
      ends.deliveries(server, 1),
      [base.Delivery(name, ends.report(3, loss=1.5), None)],
    )
    self.assertTrue(server.send(name, ends.closed(4)))
    self.assertEqual(
      ends.deliveries(client, 1),
      [base.Delivery(base.SYNCER, ends.closed(4), None)],
    )

  def test_payloads_of_every_size(self):
    server, name, client = self.start(chunk_bytes=1000)
    payloads = [
      ends.payload(*sizes, seed=k)
      for k, sizes in enumerate(
        [
          (),
          (0,),
          (0, 0, 0),
          (1,),
          (999,),
          (1000,),
          (1001,),
          (2000, 0, 3),
          (1,) * 2500,
          (7, 1000, 0, 12345, 1),
        ]
      )
    ]
    for k, payload in enumerate(payloads):
      self.assertTrue(client.send(base.SYNCER, ends.contribution(k), payload))
      self.assertTrue(server.send(name, ends.broadcast(k), payload))
    there = ends.deliveries(server, len(payloads))
    back = ends.deliveries(client, len(payloads))
    for k, payload in enumerate(payloads):
      self.assertEqual(there[k].message, ends.contribution(k))
      self.assertEqual(back[k].message, ends.broadcast(k))
      for got in (there[k].payload, back[k].payload):
        self.assertEqual(ends.as_bytes(got), ends.as_bytes(payload))
        for buffer in got.buffers:
          self.assertEqual((buffer.dtype, buffer.ndim), (np.uint8, 1))

  def test_order_is_kept(self):
    server, _, client = self.start()
    for k in range(300):
      self.assertTrue(client.send(base.SYNCER, ends.report(k)))
      self.assertTrue(
        client.send(base.SYNCER, ends.contribution(k), ends.payload(k))
      )
    items = ends.deliveries(server, 600)
    control = [x.message.seq for x in items if x.payload is None]
    bulk = [x.message.fragment for x in items if x.payload is not None]
    self.assertEqual(control, list(range(300)))
    self.assertEqual(bulk, list(range(300)))

  def test_both_priorities_arrive(self):
    server, _, client = self.start()
    for k in range(20):
      self.assertTrue(
        client.send(
          base.SYNCER, ends.contribution(k), ends.payload(5000), priority=k % 2
        )
      )
    items = ends.deliveries(server, 20)
    fragments = [x.message.fragment for x in items]
    self.assertEqual([k for k in fragments if k % 2], list(range(1, 20, 2)))
    self.assertEqual([k for k in fragments if not k % 2], list(range(0, 20, 2)))

  def test_control_arrives_beside_bulk(self):
    server, name, client = self.start()
    payload = ends.payload(16 << 20)
    for k in range(3):
      self.assertTrue(server.send(name, ends.broadcast(k), payload))
    self.assertTrue(server.send(name, ends.closed(1)))
    self.assertTrue(client.send(base.SYNCER, ends.report(2)))
    self.assertEqual(ends.deliveries(server, 1)[0].message, ends.report(2))
    items = ends.deliveries(client, 4)
    self.assertIn(ends.closed(1), [x.message for x in items])

  @parameterized.parameters('wrong', '', ends.TOKEN + ' ', ends.TOKEN[:-1])
  def test_wrong_token_is_final(self, token):
    run = self.transport()
    self.addCleanup(run.server.close)
    client = run.connect(token)
    self.addCleanup(client.close)
    self.assertEqual(
      client.receive(ends.TIMEOUT_S), [base.TokenRefused(base.SYNCER)]
    )
    self.assertFalse(client.send(base.SYNCER, ends.report()))
    # One who is let in: had the other one tried again, it would be the first.
    self.connect(run)
    self.assertEqual(run.server.receive(ends.TIMEOUT_S), [base.PeerUp('c1')])

  def test_message_size_is_bounded(self):
    server, _, client = self.start(message_bytes_max=1000)
    message = ends.contribution()
    self.assertFalse(client.send(base.SYNCER, message, ends.payload(1001)))
    self.assertFalse(client.send(base.SYNCER, message, ends.payload(600, 401)))
    self.assertTrue(client.send(base.SYNCER, message, ends.payload(600, 400)))
    self.assertLen(ends.deliveries(server, 1), 1)

  def test_bytes_in_flight_are_bounded(self):
    server, _, client = self.start(inflight_bytes_max=10_000)
    message = ends.contribution()
    self.assertFalse(client.send(base.SYNCER, message, ends.payload(10_001)))
    for _ in range(5):  # it has room again, soon after the last has arrived
      while not client.send(base.SYNCER, message, ends.payload(9000)):
        self.assertEqual(client.receive(0.001), [])
      self.assertLen(ends.deliveries(server, 1), 1)

  @parameterized.parameters(False, True)
  def test_queue_is_bounded_and_loses_nothing(self, bulk):
    server, _, client = self.start(queue_max=2)
    sent = 0
    while True:
      if bulk:
        ok = client.send(
          base.SYNCER, ends.contribution(sent), ends.payload(1 << 20)
        )
      else:
        ok = client.send(base.SYNCER, ends.report(sent))
      if not ok:
        break
      sent += 1
    self.assertGreaterEqual(sent, 2)
    items = ends.deliveries(server, sent)
    self.assertEqual(
      [x.message.fragment if bulk else x.message.seq for x in items],
      list(range(sent)),
    )

  def test_a_receiver_that_takes_nothing(self):
    """Memory is bounded at both ends; control and other peers go on."""
    server, name, client = self.start(inflight_bytes_max=4 << 20)
    payload = ends.payload(1 << 20)
    sent = 0
    refused = 0
    while refused < 50:  # until nothing moves any more
      if client.send(base.SYNCER, ends.contribution(sent), payload):
        sent, refused = sent + 1, 0
      else:
        self.assertEqual(client.receive(0.005), [])
        refused += 1
    # What the two ends hold, and what is between them.
    self.assertBetween(sent, 3, 60)
    self.assertTrue(client.send(base.SYNCER, ends.report()))
    other = self.connect(self.run_)
    self.assertTrue(other.send(base.SYNCER, ends.contribution(), payload))
    first = server.receive(ends.TIMEOUT_S)
    held = [x for x in first if x.peer == name and x.payload is not None]
    self.assertLessEqual(sum(x.payload.nbytes for x in held), 4 << 20)
    rest = ends.receive_until(
      server, lambda items: len(first) + len(items) >= sent + 3
    )
    items = [x for x in first + rest if x.peer == name]
    self.assertEqual(
      [x.message.fragment for x in items if x.payload is not None],
      list(range(sent)),
    )
    self.assertIn(ends.report(), [x.message for x in items])

  def test_unknown_peers_are_refused(self):
    server, name, client = self.start()
    self.assertFalse(server.send('c99', ends.closed()))
    self.assertFalse(server.send(base.SYNCER, ends.closed()))
    self.assertFalse(client.send(name, ends.report()))
    server.disconnect('c99')
    client.disconnect('c99')
    self.assertTrue(client.send(base.SYNCER, ends.report()))
    self.assertLen(ends.deliveries(server, 1), 1)

  def test_what_nobody_may_send(self):
    server, name, client = self.start()
    some = ends.payload(10)
    strided = base.Payload('f32', (np.zeros(10, np.uint8)[::2],))
    floats = base.Payload('f32', (np.zeros(10, np.float32),))
    named = base.Payload('x' * 33, ())
    for end, peer, message, payload in (
      (client, base.SYNCER, ends.closed(), None),  # the other way
      (client, base.SYNCER, ends.broadcast(), some),
      (server, name, ends.report(), None),
      (server, name, ends.contribution(), some),
      (client, base.SYNCER, ends.contribution(), None),
      (client, base.SYNCER, ends.report(), some),
      (client, base.SYNCER, ends.contribution(), strided),
      (client, base.SYNCER, ends.contribution(), floats),
      (client, base.SYNCER, ends.contribution(), named),
      (client, base.SYNCER, ends.report(loss=float('nan')), None),
      (client, base.SYNCER, ends.report(loss=float('inf')), None),
    ):
      with self.assertRaises(ValueError):
        end.send(peer, message, payload)
    # The connection has not suffered.
    self.assertTrue(client.send(base.SYNCER, ends.contribution(), some))
    self.assertLen(ends.deliveries(server, 1), 1)

  def test_receive_times_out(self):
    server, _, client = self.start()
    self.assertEqual(server.receive(0), [])
    self.assertEqual(client.receive(0.01), [])

  def test_wake(self):
    server, _, client = self.start()
    for end in (server, client):
      got = []
      thread = threading.Thread(
        target=lambda end=end, got=got: got.append(end.receive(None))
      )
      thread.start()
      end.wake()
      thread.join(ends.TIMEOUT_S)
      self.assertEqual(got, [[]])
      end.wake()  # before it waits
      self.assertEqual(end.receive(None), [])

  def test_client_closes_after_what_was_sent(self):
    server, name, client = self.start()
    payload = ends.payload(20 << 20)
    self.assertTrue(client.send(base.SYNCER, ends.contribution(), payload))
    self.assertTrue(client.send(base.SYNCER, ends.report()))
    ends.in_thread(client.close)
    items = ends.receive_until(server, lambda items: len(items) >= 3)
    self.assertEqual(items[-1], base.PeerDown(name, 'closed by the peer'))
    got = [x for x in items[:-1] if x.payload is not None]
    self.assertEqual(ends.as_bytes(got[0].payload), ends.as_bytes(payload))
    self.assertFalse(server.send(name, ends.closed()))
    self.assertFalse(client.send(base.SYNCER, ends.report()))

  @parameterized.parameters(False, True)
  def test_server_ends_after_what_was_sent(self, close):
    server, name, client = self.start()
    payload = ends.payload(20 << 20)
    self.assertTrue(server.send(name, ends.broadcast(), payload))
    self.assertTrue(server.send(name, ends.closed()))
    if close:
      ends.in_thread(server.close)
    else:
      server.disconnect(name)
    items = ends.receive_until(
      client, lambda items: any(isinstance(x, base.PeerDown) for x in items)
    )
    down = next(k for k, x in enumerate(items) if isinstance(x, base.PeerDown))
    self.assertEqual(down, 2, items)
    got = [x for x in items[:down] if x.payload is not None]
    self.assertEqual(ends.as_bytes(got[0].payload), ends.as_bytes(payload))
    self.assertEqual(ends.one(server, base.PeerDown).peer, name)
    self.assertFalse(server.send(name, ends.closed()))

  def test_client_disconnects(self):
    server, name, client = self.start()
    self.assertTrue(client.send(base.SYNCER, ends.report()))
    client.disconnect(base.SYNCER)
    items = ends.receive_until(server, lambda items: len(items) >= 2)
    self.assertEqual(items[0], base.Delivery(name, ends.report(), None))
    self.assertEqual(items[1], base.PeerDown(name, 'closed by the peer'))
    self.assertEqual(ends.one(client, base.PeerDown).peer, base.SYNCER)

  def test_close_twice_and_receive_afterwards(self):
    server, name, client = self.start()
    for end in (client, client, server, server):
      ends.in_thread(end.close)
    self.assertEqual(ends.one(server, base.PeerDown).peer, name)
    self.assertEqual(server.receive(None), [])
    self.assertIsInstance(client.receive(None)[0], base.PeerDown)
    self.assertEqual(client.receive(None), [])

  def test_traffic_is_counted(self):
    server, name, client = self.start()
    self.assertEqual(server.traffic(), base.Traffic(0, 0))
    client.send(base.SYNCER, ends.report())
    ends.deliveries(server, 1)
    control = server.traffic().bytes_in
    self.assertGreater(control, 0)
    client.send(base.SYNCER, ends.contribution(), ends.payload(50_000, 7))
    server.send(name, ends.broadcast(), ends.payload(100_000))
    ends.deliveries(server, 1)
    ends.deliveries(client, 1)
    up, down = server.traffic()
    self.assertEqual(client.traffic(), base.Traffic(down, up))
    self.assertBetween(up - control, 50_007, 50_007 + 2000)
    self.assertBetween(down, 100_000, 100_000 + 2000)
    # What was counted stays counted when the connection is gone.
    ends.in_thread(client.close)
    ends.one(server, base.PeerDown)
    self.assertEqual(server.traffic(), base.Traffic(up, down))
    self.assertEqual(client.traffic(), base.Traffic(down, up))

  def test_sixteen_peers(self):
    run = self.transport()
    self.addCleanup(ends.in_thread, run.server.close)
    clients = [self.connect(run) for _ in range(16)]
    ups = ends.receive_until(run.server, lambda items: len(items) >= 16)
    self.assertLen(set(ups), 16)
    for k, client in enumerate(clients):
      payload = ends.payload(1000 * k + 1, seed=k)
      self.assertTrue(client.send(base.SYNCER, ends.contribution(k), payload))
    for item in ends.deliveries(run.server, 16):
      k = item.message.fragment
      self.assertLen(item.payload.buffers[0], 1000 * k + 1)
      self.assertTrue(
        run.server.send(item.peer, ends.broadcast(k), item.payload)
      )
    for k, client in enumerate(clients):
      (item,) = ends.deliveries(client, 1)
      self.assertEqual(item.message, ends.broadcast(k))
      expected = ends.payload(1000 * k + 1, seed=k)
      self.assertEqual(ends.as_bytes(item.payload), ends.as_bytes(expected))
    ends.in_thread(clients[3].close)
    ends.one(run.server, base.PeerDown)
    self.assertTrue(clients[4].send(base.SYNCER, ends.report()))
    self.assertLen(ends.deliveries(run.server, 1), 1)

  def test_an_empty_token_is_no_token(self):
    self.enter_context(mock.patch.object(ends, 'TOKEN', ''))
    with self.assertRaises(ValueError):
      self.transport()


class InProcessTest(Contract):
  transport = ends.InProcess

  def test_a_hundred_peers(self):
    run = self.transport()
    self.addCleanup(run.server.close)
    clients = [self.connect(run) for _ in range(100)]
    names = [x.peer for x in run.server.receive(0)]
    self.assertLen(set(names), 100)
    for k, client in enumerate(clients):
      self.assertTrue(client.send(base.SYNCER, ends.report(k)))
    for k, item in enumerate(ends.deliveries(run.server, 100)):
      self.assertEqual((item.peer, item.message.seq), (names[k], k))


class GrpcTest(Contract):
  transport = ends.Grpc


del Contract  # it is no test by itself


if __name__ == '__main__':
  absltest.main()
