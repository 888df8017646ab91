"""Options: what is no option, and ends whose options differ."""

import os
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from diloco_jax.errors import UserError
from diloco_jax.transport import base
from diloco_jax.transport import grpc
from tests.transport import ends
from tests.transport.grpc_case import GrpcCase


class OptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('chunk_bytes', 0),
    ('message_bytes_max', -1),
    ('queue_max', 0),
    ('deadline_s', 0.0),
    ('keepalive_s', float('nan')),
  )
  def test_nothing_is_no_bound(self, name, value):
    with self.assertRaisesRegex(ValueError, f'{name}='):
      base.TransportOptions(**{name: value})

  def test_the_largest_payload_is_within_both_bounds(self):
    for message, inflight in ((5, 7), (7, 5)):
      options = base.TransportOptions(
        message_bytes_max=message, inflight_bytes_max=inflight
      )
      self.assertEqual(options.payload_bytes_max, 5)


class DifferentEndsTest(GrpcCase):
  def exchange(self, server, client):
    ends.one(client, base.PeerUp)
    peer = ends.one(server, base.PeerUp).peer
    payload = ends.payload(40 << 20)
    self.assertTrue(client.send(base.SYNCER, ends.contribution(), payload))
    self.assertTrue(server.send(peer, ends.broadcast(), payload))
    for end in (server, client):
      (item,) = ends.deliveries(end, 1)
      self.assertEqual(ends.as_bytes(item.payload), ends.as_bytes(payload))

  def test_chunks_of_any_size(self):
    for there, here in ((1 << 16, 1 << 30), (1 << 30, 1 << 16)):
      server = self.serve(chunk_bytes=there)
      self.exchange(server, self.connect(server.address, chunk_bytes=here))

  def test_a_proxy_for_the_web_is_not_asked(self):
    server = self.serve()
    proxy = {'http_proxy': 'http://192.0.2.1:9', 'no_proxy': ''}
    with mock.patch.dict(os.environ, proxy):
      client = self.connect(server.address)
      ends.one(client, base.PeerUp)


class AddressTest(GrpcCase):
  @parameterized.parameters('127.0.0.1:65536', '127.0.0.1:x', '127.0.0.1', ':1')
  def test_no_address(self, address):
    with self.assertRaisesRegex(UserError, 'HOST:PORT'):
      grpc.serve(address, ends.TOKEN)

  def test_any_token_may_be_chosen(self):
    token = 'ключ\nwith a line break '
    server = grpc.serve('127.0.0.1:0', token)
    self.addCleanup(server.close)
    client = ends.connect(server.address, token)
    self.addCleanup(ends.in_thread, client.close)
    ends.one(client, base.PeerUp)
    other = ends.connect(server.address, token.strip())
    self.addCleanup(ends.in_thread, other.close)
    ends.one(other, base.TokenRefused)


if __name__ == '__main__':
  absltest.main()
