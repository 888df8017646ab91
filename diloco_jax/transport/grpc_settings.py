"""What gRPC is told: sizes, times, certificates."""

import pathlib
import ssl
from typing import Any

import grpc

from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.transport import base

SERVICE = 'diloco_jax.Exchange'
# Metadata; what ends in -bin may hold any bytes.
TOKEN = 'token-bin'
SESSION = 'session'
ACCEPTED = ('accepted', '1')  # from the server, once it has taken the token
CONTROL = 'control'
BULK = 'bulk'
STREAMS = (CONTROL, BULK)
FRAME_BYTES_MAX = (1 << 24) + (1 << 20)  # the largest chunk, and room
TLS = 'launch.transport.tls'  # where the files are named


def channel_options(
  options: base.TransportOptions, *, is_server: bool
) -> list[tuple[str, Any]]:
  """The settings of a channel or of a server."""
  keepalive_ms = max(1, int(options.keepalive_s * 1000))
  settings: list[tuple[str, Any]] = [
    # The same at both ends, whatever the size of their own chunks.
    ('grpc.max_send_message_length', FRAME_BYTES_MAX),
    ('grpc.max_receive_message_length', FRAME_BYTES_MAX),
    ('grpc.keepalive_time_ms', keepalive_ms),
    ('grpc.keepalive_timeout_ms', keepalive_ms),
    # Without it, an answer is waited for a minute, whatever the former says.
    ('grpc.http2.ping_timeout_ms', keepalive_ms),
    ('grpc.keepalive_permit_without_calls', 1),
    ('grpc.http2.max_pings_without_data', 0),
    ('grpc.http2.max_frame_size', 1 << 20),
    ('grpc.http2.lookahead_bytes', 1 << 24),
  ]
  if is_server:
    # Two servers on one port would each get half of the islands.
    settings.append(('grpc.so_reuseport', 0))
    # Each end has a keepalive of its own: nobody is sent away for asking.
    settings.append(('grpc.http2.max_ping_strikes', 0))
  else:
    # Each stream has a connection of its own.
    settings.append(('grpc.use_local_subchannel_pool', 1))
    # A proxy for the web does not know the islands.
    settings.append(('grpc.enable_http_proxy', 0))
  return settings


def _wants_tls(options: base.TransportOptions) -> bool:
  """Any of the settings: one left out must not mean plain text."""
  files = (options.tls_cert, options.tls_key, options.tls_ca)
  return options.mutual_tls or any(files)


def _problem(name: str, path: str, error: OSError) -> Problem:
  reason = error.strerror or str(error)
  return Problem(f'{TLS}_{name}', path, 'a readable PEM file', reason)


def _read_files(
  options: base.TransportOptions, needed: tuple[str, ...]
) -> dict[str, bytes | None]:
  """The content of 'cert', 'key' and 'ca', None where not given.

  gRPC says nothing of a file that does not do; every connection would fail.

  Raises:
    UserError: with a problem for each file that is needed and not given, or
      is none, or does not fit the other.
  """
  paths = {
    'cert': options.tls_cert,
    'key': options.tls_key,
    'ca': options.tls_ca,
  }
  problems = [
    Problem(f'{TLS}_{name}', 'nothing', 'a PEM file', 'TLS needs it here')
    for name in needed
    if not paths[name]
  ]
  content = dict[str, bytes | None].fromkeys(paths)
  for name, path in paths.items():
    try:
      content[name] = pathlib.Path(path).read_bytes() if path else None
    except OSError as e:
      problems.append(_problem(name, path, e))
  if problems:
    raise UserError(problems)
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  try:
    if options.tls_ca:
      context.load_verify_locations(options.tls_ca)
  except OSError as e:
    problems.append(_problem('ca', options.tls_ca, e))
  try:
    if 'cert' in needed:
      # Without the last argument a terminal is asked for a locked key.
      context.load_cert_chain(options.tls_cert, options.tls_key, lambda: '')
  except OSError as e:
    both = f'{options.tls_cert}, {options.tls_key}'
    problems.append(_problem('cert and its key', both, e))
  if problems:
    raise UserError(problems)
  return content


def server_credentials(options: base.TransportOptions) -> Any:
  """None without TLS. Raises UserError where a file does not do."""
  if not _wants_tls(options):
    return None
  authority = ('ca',) if options.mutual_tls else ()
  files = _read_files(options, ('cert', 'key', *authority))
  return grpc.ssl_server_credentials(
    [(files['key'], files['cert'])],
    root_certificates=files['ca'] if options.mutual_tls else None,
    require_client_auth=options.mutual_tls,
  )


def client_credentials(options: base.TransportOptions) -> Any:
  """None without TLS. Raises UserError where a file does not do.

  Without an authority, those that the machine trusts.
  """
  if not _wants_tls(options):
    return None
  if not options.mutual_tls:
    return grpc.ssl_channel_credentials(_read_files(options, ())['ca'])
  files = _read_files(options, ('cert', 'key', 'ca'))
  return grpc.ssl_channel_credentials(
    files['ca'], private_key=files['key'], certificate_chain=files['cert']
  )
