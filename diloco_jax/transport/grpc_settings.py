"""What gRPC is told: sizes, times, certificates."""

import pathlib
from typing import Any

import grpc

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.transport import base

SERVICE = 'diloco_jax.Exchange'
CONTROL = 'control'
BULK = 'bulk'
STREAMS = (CONTROL, BULK)
FRAME_SLACK = 1 << 20  # header and JSON beyond the chunk
TLS = 'launch.transport.tls'  # where the files are named


def channel_options(
  options: base.TransportOptions, *, is_server: bool
) -> list[tuple[str, Any]]:
  """The settings of a channel or of a server."""
  most = options.chunk_bytes + FRAME_SLACK
  keepalive_ms = int(options.keepalive_s * 1000)
  settings: list[tuple[str, Any]] = [
    ('grpc.max_send_message_length', most),
    ('grpc.max_receive_message_length', most),
    ('grpc.keepalive_time_ms', keepalive_ms),
    ('grpc.keepalive_timeout_ms', keepalive_ms),
    ('grpc.keepalive_permit_without_calls', 1),
    ('grpc.http2.max_pings_without_data', 0),
    ('grpc.http2.max_frame_size', 1 << 20),
    ('grpc.http2.lookahead_bytes', 1 << 24),
  ]
  if is_server:
    # Two servers on one port would each get half of the islands.
    settings.append(('grpc.so_reuseport', 0))
    settings.append(
      ('grpc.http2.min_ping_interval_without_data_ms', keepalive_ms // 2)
    )
  else:
    # Each stream has a connection of its own.
    settings.append(('grpc.use_local_subchannel_pool', 1))
  return settings


def _read(path: str, where: str) -> bytes | None:
  if not path:
    return None
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as e:
    raise UserError(
      [Problem(where, path, 'a readable PEM file', str(e.strerror))]
    ) from e


def server_credentials(options: base.TransportOptions) -> Any:
  """None without TLS. Raises UserError where a file is missing."""
  certificate = _read(options.tls_cert, f'{TLS}_cert')
  key = _read(options.tls_key, f'{TLS}_key')
  authority = _read(options.tls_ca, f'{TLS}_ca')
  if certificate is None and not options.mutual_tls:
    return None
  if (
    certificate is None
    or key is None
    or (options.mutual_tls and authority is None)
  ):
    raise UserError(
      [
        Problem(
          f'{TLS}_cert, {TLS}_key and {TLS}_ca',
          'some of them not given',
          'PEM files for TLS; the authority too for mutual TLS',
          'give them, or leave tls_cert empty and mutual_tls off',
        )
      ]
    )
  return grpc.ssl_server_credentials(
    [(key, certificate)],
    root_certificates=authority if options.mutual_tls else None,
    require_client_auth=options.mutual_tls,
  )


def client_credentials(options: base.TransportOptions) -> Any:
  """None without TLS. Raises UserError where a file is missing."""
  authority = _read(options.tls_ca, f'{TLS}_ca')
  certificate = key = None
  if options.mutual_tls:
    certificate = _read(options.tls_cert, f'{TLS}_cert')
    key = _read(options.tls_key, f'{TLS}_key')
    if authority is None or certificate is None or key is None:
      raise UserError(
        [
          Problem(
            f'{TLS}_ca, {TLS}_cert and {TLS}_key',
            'some of them not given',
            'all three for mutual TLS',
            'give them, or leave mutual_tls off',
          )
        ]
      )
  if authority is None:
    return None
  return grpc.ssl_channel_credentials(
    authority, private_key=key, certificate_chain=certificate
  )
