"""Peers with or without the token that keep to no protocol, over gRPC."""

import pathlib
import socket
import threading

from absl.testing import absltest
from absl.testing import parameterized
import grpc as grpc_library

from diloco_jax.transport import base
from diloco_jax.transport import frames
from tests.transport import ends
from tests.transport.grpc_case import GrpcCase

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
UNAUTHENTICATED = grpc_library.StatusCode.UNAUTHENTICATED


class HostileTest(GrpcCase):
  """A peer with the token that does not keep to the protocol."""

  @parameterized.named_parameters(
    ('garbage', 'control', b'\0' * 100, 'not a frame'),
    ('short', 'bulk', b'x', 'no frame'),
    ('empty', 'control', b'', 'no frame'),
    (
      'magic',
      'control',
      b'diLo' + frames.control_frame(ends.report())[4:],
      'not a frame',
    ),
    (
      'version',
      'control',
      b'DiLo\x63' + frames.control_frame(ends.report())[5:],
      'wire version 99',
    ),
    (
      'checksum',
      'control',
      frames.control_frame(ends.report())[:-1] + b'x',
      'wrong checksum',
    ),
    (
      'other_way',
      'control',
      frames.control_frame(ends.closed()),
      'goes the other way',
    ),
    (
      'nan',
      'control',
      frames._frame(frames.CONTROL, 0, b'{"_": NaN}'),
      'NaN',
    ),
    (
      'unknown',
      'control',
      frames._frame(frames.CONTROL, 0, b'{"_": "Exec"}'),
      'unknown message',
    ),
    (
      'chunk_of_nothing',
      'bulk',
      frames._frame(frames.CHUNK, 1, b'abc'),
      'a chunk of nothing',
    ),
    (
      'oversize',
      'bulk',
      next(
        iter(frames.bulk_frames(1, ends.contribution(), ends.payload(2000), 10))
      ),
      'at most 1000',
    ),
    ('oversize_frame', 'bulk', b'x' * (20 << 20), 'connection lost'),
  )
  def test_is_dropped_with_a_reason(self, stream, frame, reason):
    server = self.serve(message_bytes_max=1000)
    raw = self.raw(server)
    peer = ends.one(server, base.PeerUp).peer
    raw.send(stream, frame)
    down = ends.one(server, base.PeerDown)
    self.assertEqual(down.peer, peer)
    self.assertIn(reason, down.reason)
    for call in raw.calls.values():
      call.code()  # both streams are over
    self.assertFalse(server.send(peer, ends.closed()))
    self.still_works(server)

  @parameterized.parameters(
    ((),),
    ((('token-bin', b''),),),
    ((('session', 'a'),),),
    ((('token-bin', ends.TOKEN.encode() + b'x'), ('session', 'a')),),
  )
  def test_no_entry_without_the_token(self, metadata):
    server = self.serve()
    raw = self.raw(server, metadata=metadata)
    for call in raw.calls.values():
      self.assertEqual(call.code(), UNAUTHENTICATED)
    self.still_works(server)

  @parameterized.parameters('', 'x' * 65)
  def test_no_entry_without_a_session(self, session):
    server = self.serve()
    raw = self.raw(
      server,
      metadata=(('token-bin', ends.TOKEN.encode()), ('session', session)),
    )
    for call in raw.calls.values():
      self.assertNotEqual(call.code(), grpc_library.StatusCode.OK)
    self.still_works(server)

  def test_a_session_is_not_shared(self):
    server = self.serve()
    metadata = (('token-bin', ends.TOKEN.encode()), ('session', 'mine'))
    raw = self.raw(server, metadata=metadata)
    peer = ends.one(server, base.PeerUp).peer
    other = self.raw(server, metadata=metadata)
    for call in other.calls.values():
      self.assertNotEqual(call.code(), grpc_library.StatusCode.OK)
    raw.send('control', frames.control_frame(ends.report()))
    self.assertEqual(
      ends.deliveries(server, 1), [base.Delivery(peer, ends.report(), None)]
    )

  @parameterized.parameters('control', 'bulk')
  def test_half_a_connection_is_none(self, stream):
    server = self.serve(connect_timeout_s=0.1)
    raw = self.raw(server, streams=(stream,))
    raw.send(stream, frames.control_frame(ends.report()))
    raw.calls[stream].code()  # it has ended
    self.assertEqual(server.receive(0), [])
    self.still_works(server)

  def test_an_end_of_half_a_connection_is_the_end(self):
    server = self.serve(deadline_s=0.1)
    raw = self.raw(server)
    ends.one(server, base.PeerUp)
    raw.send('control', frames.end_frame())
    raw.send('control', None)
    self.assertIn('half', ends.one(server, base.PeerDown).reason)

  def test_who_is_gone_has_not_closed(self):
    server = self.serve()
    raw = self.raw(server)
    ends.one(server, base.PeerUp)
    raw.send('control', None)
    self.assertEqual(ends.one(server, base.PeerDown).reason, 'connection lost')

  def test_one_who_reads_nothing_is_given_up(self):
    server = self.serve(deadline_s=0.2)
    self.raw(server)
    peer = ends.one(server, base.PeerUp).peer
    server.send(peer, ends.broadcast(), ends.payload(64 << 20))
    self.assertIn('does not take', ends.one(server, base.PeerDown).reason)

  def no_stream_is_left(self):
    for thread in threading.enumerate():
      if thread.name == 'transport stream':
        thread.join(ends.TIMEOUT_S)
        self.assertFalse(thread.is_alive())

  def test_its_threads_end_though_it_still_reads_nothing(self):
    server = self.serve()
    raw = self.raw(server)
    peer = ends.one(server, base.PeerUp).peer
    server.send(peer, ends.broadcast(), ends.payload(64 << 20))
    raw.send('control', b'garbage')
    ends.one(server, base.PeerDown)
    self.no_stream_is_left()

  def test_is_told_what_it_did(self):
    server = self.serve()
    raw = self.raw(server)
    ends.one(server, base.PeerUp)
    raw.send('control', b'DiLo\2' + bytes(30))
    down = ends.one(server, base.PeerDown)
    for call in raw.calls.values():
      self.assertEqual(call.code(), grpc_library.StatusCode.ABORTED)
      self.assertEqual(call.details(), down.reason)

  def test_a_message_that_does_not_go_on(self):
    server = self.serve(deadline_s=0.2)
    raw = self.raw(server)
    ends.one(server, base.PeerUp)
    first, second, _ = frames.bulk_frames(
      1, ends.contribution(), ends.payload(20), 10
    )
    raw.send('bulk', first)
    raw.send('bulk', second)
    down = ends.one(server, base.PeerDown)
    self.assertEqual(down.reason, 'does not go on with a message')

  def test_control_passes_bulk_that_nobody_reads(self):
    server = self.serve()
    raw = self.raw(server)
    peer = ends.one(server, base.PeerUp).peer
    server.send(peer, ends.broadcast(), ends.payload(64 << 20))
    server.send(peer, ends.closed())
    self.assertEqual(
      next(raw.calls['control']), frames.control_frame(ends.closed())
    )

  def test_unknown_methods(self):
    server = self.serve()
    raw = self.raw(server, streams=('other',))
    self.assertEqual(
      raw.calls['other'].code(), grpc_library.StatusCode.UNIMPLEMENTED
    )
    self.still_works(server)

  def test_not_even_http(self):
    server = self.serve()
    host, port = server.address.split(':')
    with socket.create_connection((host, int(port))) as connection:
      connection.sendall(b'\0' * 1000)
    self.still_works(server)


if __name__ == '__main__':
  absltest.main()
