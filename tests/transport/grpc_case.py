"""What tests of gRPC share."""

import threading

from absl.testing import parameterized

from diloco_jax.transport import base
from diloco_jax.transport import grpc
from tests.transport import ends


def local_address(listening):
  return f'127.0.0.1:{listening.getsockname()[1]}'


class GrpcCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    before = set(threading.enumerate())
    self.addCleanup(self._no_thread_is_left, before)

  def _no_thread_is_left(self, before):
    for thread in set(threading.enumerate()) - before:
      thread.join(ends.TIMEOUT_S)
      self.assertFalse(thread.is_alive(), thread.name)

  def serve(self, address='127.0.0.1:0', **options):
    server = grpc.serve(address, ends.TOKEN, base.TransportOptions(**options))
    self.addCleanup(ends.in_thread, server.close)
    return server

  def connect(self, address, **options):
    client = ends.connect(address, options=base.TransportOptions(**options))
    self.addCleanup(ends.in_thread, client.close)
    return client

  def raw(self, server, **kwargs):
    raw = ends.RawClient(server.address, **kwargs)
    self.addCleanup(raw.close)
    return raw

  def still_works(self, server):
    client = self.connect(server.address)
    ends.one(client, base.PeerUp)
    client.send(base.SYNCER, ends.contribution(), ends.payload(1000))
    self.assertEqual(
      ends.one(server, base.Delivery).message, ends.contribution()
    )
