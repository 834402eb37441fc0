"""Main function of an engine's process: builds the engine and serves until it is stopped."""

import gc
import logging
import os
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from msgspec.structs import replace

from maitred.core.clock import SystemClock
from maitred.core.errors import ConfigInvalid
from maitred.core.flow import ServiceWeights
from maitred.core.parent_watch import START_ID_VARIABLE
from maitred.core.replica import ModelCard
from maitred.core.request import ModelFingerprint
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.device import ComputeDevice, PrecisionPlan, step_threads
from maitred.engine.encoder.build import build_encoder
from maitred.engine.encoder.shape import is_encoder
from maitred.engine.lean_torch import complete_torch
from maitred.engine.models.digest import content_digest, fingerprint_of
from maitred.engine.nvml import Gpu, open_gpu
from maitred.engine.process_stats import ProcessStats
from maitred.engine.server import EngineServer, StepEngine
from maitred.wire.address import TcpAddress, UnixAddress, parse_address
from maitred.wire.link.config import LinkConfig
from maitred.wire.link.credentials import listener_credentials

logger = logging.getLogger("maitred.engine")


def serve(
    model: Path,
    config: EngineConfig,
    listen: str,
    weights: ServiceWeights,
    link: LinkConfig | None = None,
    region: str | None = None,
) -> None:
    """Runs an engine in this process until SIGTERM, or until the parent process has exited.

    Args:
        model: Folder with the model.
        config: The `engine` section.
        listen: ``unix:/path`` or ``tcp:host:port``.
        weights: Service that the fair queue charges per token.
        link: The `engine_link` section; None for an engine that its gateway starts. Then only this gateway connects and
            both use the same files.
        region: Region of this process, which gateways are told; None: it tells none.

    Raises:
        ConfigInvalid: The model, the device or the address is not available; the message says what to do.
    """
    start_s = time.perf_counter()
    address = parse_address(listen)
    credentials = listener_credentials(address, link or LinkConfig())
    listener = _listen(address)
    # Reading all weights takes longer than mapping them, so a thread does it while the model is built.
    digest = ThreadPoolExecutor(1, "model digest").submit(_digest_of, model)
    try:
        engine, card = _build_steps(model, config, weights, digest)
        # The objects of the model and its libraries stay until the process ends. Without the freeze the garbage
        # collector would visit them repeatedly, which delays tokens.
        gc.freeze()
        gc.enable()
        clock = SystemClock()
        model_s = time.perf_counter() - start_s
        server = EngineServer(
            engine,
            replace(card, region=region),
            listener,
            clock,
            credentials=credentials,
            vitals=ProcessStats(clock, _gpu_index(card)),
            model_s=model_s,
            start_id=os.environ.get(START_ID_VARIABLE, ""),
            drain_grace_s=config.drain_grace_s,
        )
        server.watch_signals()
        listener.listen(128)
        logger.info(
            "%s (%s, %s) ready on %s after %.1f s: %d tokens of KV, %d sequences",
            *(card.name, card.dtype, card.device, _bound(listener, address), model_s),
            *(card.kv_capacity_tokens, card.max_sequences),
        )
        server.run()
        load = engine.load()
        if load.drafted_tokens:
            logger.info("%d of %d drafted tokens were right", load.accepted_tokens, load.drafted_tokens)
    finally:
        listener.close()
        if isinstance(address, UnixAddress):
            Path(address.path).unlink(missing_ok=True)


def _digest_of(model: Path) -> ModelFingerprint:
    """Computes the fingerprint of a model, with the content of its weights."""
    return replace(fingerprint_of(model), content=content_digest(model))


def _build_steps(
    model: Path, config: EngineConfig, weights: ServiceWeights, digest: Future[ModelFingerprint]
) -> tuple[StepEngine, ModelCard]:
    """Builds the engine without its socket, for a model that generates text or embeddings."""
    if config.pooling is None and not is_encoder(model):
        engine, card = build(model, config, weights)
        return engine, replace(card, digest=digest.result())
    if config.quantization != "none":
        raise ConfigInvalid(
            f"engine.quantization is for models that generate, and {model.name} computes embeddings. Set it to none."
        )
    complete_torch()
    device = ComputeDevice.of(config.device).device
    torch.set_num_threads(step_threads(config.threads))
    dtype = PrecisionPlan.of(config, device).dtype
    return build_encoder(model, config, dtype=dtype, device=device, digest=digest.result)


def _gpu_index(card: ModelCard) -> Gpu | None:
    """Opens the model's GPU for NVML; None: the model runs on a CPU, or NVML cannot read the GPU."""
    device = torch.device(card.device)
    return None if device.type != "cuda" else open_gpu(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def _listen(address: UnixAddress | TcpAddress) -> socket.socket:
    """Binds the socket before the model is read, so that a used address is reported at once.

    The socket starts to listen, and so to accept connections, only when the engine is ready.
    """
    try:
        if isinstance(address, UnixAddress):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(address.path)
        else:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address.host, address.port))
    except OSError as error:
        raise ConfigInvalid(
            f"Cannot listen on {address}: {error.strerror or error}. Choose another address with --listen."
        ) from error
    return sock


def _bound(listener: socket.socket, address: UnixAddress | TcpAddress) -> UnixAddress | TcpAddress:
    """Returns the bound address, with the port that the system chose for port 0."""
    return address if isinstance(address, UnixAddress) else TcpAddress(address.host, listener.getsockname()[1])
