"""gRPC alone: strange servers, full inboxes, lost peers, ports."""

import concurrent.futures
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from unittest import mock

from absl.testing import absltest
import grpc as grpc_library

from diloco_jax.errors import UserError
from diloco_jax.transport import base
from diloco_jax.transport import frames
from diloco_jax.transport import grpc
from diloco_jax.transport import grpc_server
from tests.transport import ends
from tests.transport.grpc_case import GrpcCase
from tests.transport.grpc_case import local_address

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
UNAUTHENTICATED = grpc_library.StatusCode.UNAUTHENTICATED


class StrangeServerTest(GrpcCase):
  """A client whose server is another than ours."""

  def strange_server(self, control, bulk):
    """A server with these handlers; its address."""
    executor = concurrent.futures.ThreadPoolExecutor(8)
    server = grpc_library.server(executor)
    handlers = {
      'control': grpc_library.stream_stream_rpc_method_handler(control),
      'bulk': grpc_library.stream_stream_rpc_method_handler(bulk),
    }
    server.add_generic_rpc_handlers(
      [
        grpc_library.method_handlers_generic_handler(
          'diloco_jax.Exchange', handlers
        )
      ]
    )
    port = server.add_insecure_port('127.0.0.1:0')
    server.start()
    self.addCleanup(executor.shutdown)
    self.addCleanup(lambda: server.stop(0).wait())
    return f'127.0.0.1:{port}'

  def reads_no_bulk(self):
    """The address of one; the control frames that it gets; its end."""
    got = queue.Queue()
    over = threading.Event()
    self.addCleanup(over.set)

    def control(requests, context):
      context.send_initial_metadata((('accepted', '1'),))
      for frame in requests:
        got.put(frame)
      yield from ()

    def bulk(requests, context):
      del requests
      context.send_initial_metadata((('accepted', '1'),))
      over.wait(ends.TIMEOUT_S)
      yield from ()

    return self.strange_server(control, bulk), got, over

  def test_control_passes_bulk_that_nobody_reads(self):
    address, got, over = self.reads_no_bulk()
    client = self.connect(address)
    ends.one(client, base.PeerUp)
    client.send(base.SYNCER, ends.contribution(), ends.payload(64 << 20))
    client.send(base.SYNCER, ends.report(1))
    self.assertEqual(
      got.get(timeout=ends.TIMEOUT_S), frames.control_frame(ends.report(1))
    )
    over.set()

  def test_one_that_reads_nothing_is_given_up(self):
    address, _, over = self.reads_no_bulk()
    client = self.connect(address, deadline_s=0.2)
    ends.one(client, base.PeerUp)
    client.send(base.SYNCER, ends.contribution(), ends.payload(64 << 20))
    self.assertIn('does not take', ends.one(client, base.PeerDown).reason)
    over.set()

  def test_bad_frames_end_the_connection(self):
    def control(requests, context):
      context.send_initial_metadata((('accepted', '1'),))
      yield b'garbage, thirty bytes or more of it'
      yield from requests

    def bulk(requests, context):
      context.send_initial_metadata((('accepted', '1'),))
      yield from requests

    client = self.connect(self.strange_server(control, bulk))
    ends.one(client, base.PeerUp)
    self.assertIn('not a frame', ends.one(client, base.PeerDown).reason)

  def test_one_that_never_answers_keeps_no_client(self):
    with socket.create_server(('127.0.0.1', 0)) as listening:
      client = self.connect(local_address(listening))
      connection, _ = listening.accept()
      with connection:
        self.assertFalse(client.send(base.SYNCER, ends.report()))
        ends.in_thread(client.close)

  def test_nobody_there_keeps_no_client(self):
    with socket.create_server(('127.0.0.1', 0)) as listening:
      address = local_address(listening)
    client = self.connect(address)
    ends.in_thread(client.close)
    self.assertEqual(client.receive(None), [])


class FullInboxTest(GrpcCase):
  """Nobody receives at the server, whose inbox has room for one message."""

  def test_priority_and_close(self):
    server = self.serve(queue_max=1)
    client = self.connect(server.address)
    ends.one(client, base.PeerUp)
    for fragment, size, priority in (
      (0, 10, 0),  # fills the inbox
      (1, 10, 0),  # waits for room, and stops the stream
      (2, 96 << 20, 1),  # more than streams hold
      (3, 10, 0),  # passes it
      (4, 10, 1),
    ):
      self.assertTrue(
        client.send(
          base.SYNCER,
          ends.contribution(fragment),
          ends.payload(size),
          priority,
        )
      )
    items = ends.receive_until(server, lambda items: len(items) >= 6)
    self.assertEqual([x.message.fragment for x in items[1:]], [0, 1, 3, 2, 4])

  def test_closes_while_readers_wait_for_room(self):
    server = self.serve(queue_max=1)
    client = self.connect(server.address)
    ends.one(client, base.PeerUp)
    ends.one(server, base.PeerUp)
    for k in range(5):
      client.send(base.SYNCER, ends.report(k))
      client.send(base.SYNCER, ends.contribution(k), ends.payload(1000))
    with mock.patch.object(grpc_server, 'CLOSE_S', 0.1):
      ends.in_thread(server.close)
    items = server.receive(None)
    downs = [k for k, x in enumerate(items) if isinstance(x, base.PeerDown)]
    self.assertEqual(downs, [len(items) - 1])


CHILD = """
import random, sys
from diloco_jax.transport import grpc
client = grpc.connect(sys.argv[1], sys.argv[2], rng=random.Random(0))
print(client.receive(60), flush=True)
sys.stdin.read()
"""


class LostTest(GrpcCase):
  def test_a_killed_client_is_noticed(self):
    server = self.serve()
    child = subprocess.Popen(
      [sys.executable, '-c', CHILD, server.address, ends.TOKEN],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )
    with child:
      try:
        peer = ends.one(server, base.PeerUp).peer
        self.assertIn(b'PeerUp', child.stdout.readline())
        self.assertTrue(server.send(peer, ends.closed()))
      finally:
        os.kill(child.pid, signal.SIGKILL)
      down = ends.one(server, base.PeerDown)
    self.assertEqual(down, base.PeerDown(peer, 'connection lost'))
    self.assertFalse(server.send(peer, ends.closed()))
    self.still_works(server)

  def test_a_server_that_comes_again_is_found(self):
    server = self.serve()
    client = self.connect(server.address, backoff_first_s=0.01)
    self.assertEqual(client.receive(ends.TIMEOUT_S), [base.PeerUp('syncer')])
    ends.in_thread(server.close)
    self.assertEqual(ends.one(client, base.PeerDown).peer, base.SYNCER)
    self.assertFalse(client.send(base.SYNCER, ends.report()))
    again = self.serve(server.address)
    self.assertEqual(again.address, server.address)
    ends.one(client, base.PeerUp)
    peer = ends.one(again, base.PeerUp).peer
    client.send(base.SYNCER, ends.contribution(), ends.payload(100_000))
    self.assertEqual(ends.deliveries(again, 1)[0].peer, peer)
    again.send(peer, ends.closed())
    self.assertEqual(ends.deliveries(client, 1)[0].message, ends.closed())

  def test_the_server_may_come_after_the_client(self):
    with socket.create_server(('127.0.0.1', 0)) as listening:
      address = local_address(listening)
    client = self.connect(address, backoff_first_s=0.01)
    self.serve(address)
    ends.one(client, base.PeerUp)

  def test_a_client_that_was_sent_away_comes_again(self):
    server = self.serve()
    client = self.connect(server.address, backoff_first_s=0.01)
    first = ends.one(server, base.PeerUp).peer
    ends.one(client, base.PeerUp)
    server.disconnect(first)
    ends.one(client, base.PeerDown)
    ends.one(client, base.PeerUp)
    self.assertNotEqual(ends.one(server, base.PeerUp).peer, first)

  def test_a_token_that_is_refused_later(self):
    server = self.serve()
    client = self.connect(server.address, backoff_first_s=0.01)
    ends.one(client, base.PeerUp)
    ends.in_thread(server.close)
    ends.one(client, base.PeerDown)
    other = grpc.serve(server.address, 'another token')
    self.addCleanup(ends.in_thread, other.close)
    self.assertEqual(
      client.receive(ends.TIMEOUT_S), [base.TokenRefused(base.SYNCER)]
    )
    self.assertIn('UNAUTHENTICATED', client.trouble)

  def test_trouble_is_told(self):
    with socket.create_server(('127.0.0.1', 0)) as listening:
      address = local_address(listening)
    tried = threading.Event()

    class Rng:
      def uniform(self, low, high):
        del high
        tried.set()
        return low

    client = grpc.connect(address, ends.TOKEN, rng=Rng())
    self.addCleanup(ends.in_thread, client.close)
    self.assertTrue(tried.wait(ends.TIMEOUT_S))
    self.assertRegex(client.trouble, 'UNAVAILABLE: .*refused')
    self.serve(address)
    ends.one(client, base.PeerUp)
    self.assertEqual(client.trouble, '')

  def test_a_port_in_use_is_told(self):
    server = self.serve()
    with self.assertRaisesRegex(UserError, 'the port is in use'):
      grpc.serve(server.address, ends.TOKEN)
    self.still_works(server)

  def test_an_address_of_nobody_is_told(self):
    with self.assertRaisesRegex(UserError, 'not an address of this machine'):
      grpc.serve('192.0.2.1:0', ends.TOKEN)


if __name__ == '__main__':
  absltest.main()
