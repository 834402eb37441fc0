"""The gateways that are compared, and how each is configured.

All get the same two things to do, pass requests on to one server and check one key, and of the settings that their own
documentation advises for production those that make them fast. maitred alone has everything on: its key belongs to a
team of an organisation, with limits and budgets, prices, the ledger, metrics and timelines.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.gateway.gateway_cost import BUDGETS, KEY_LIMITS
from benchmarks.support.canned_upstream import MODELS
from benchmarks.support.environments import HOME, Environment
from benchmarks.support.gateways.contenders import KEY, Contender, Place

_LITELLM = Environment(name="litellm", packages=["litellm[proxy]==1.106.2"])
_PORTKEY, _PORTKEY_VERSION = HOME / "portkey", "1.15.2"
_PORTKEY_PACKAGE = {
    "dependencies": {"@portkey-ai/gateway": _PORTKEY_VERSION},
    "overrides": {"@hono/node-server": "1.13.8"},
}
"""With releases of its HTTP server as new as 1.19 it answers every stream with 500 (immutable headers)."""
_PORTKEY_STARTS = _PORTKEY / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
_NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr error; worker_rlimit_nofile 32768;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  client_max_body_size 16m; client_body_buffer_size 4m;
  upstream canned {{ server 127.0.0.1:{upstream}; keepalive 512; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; keepalive_requests 1000000000;
    location / {{
      if ($http_authorization != "Bearer {key}") {{ return 401; }}
      proxy_pass http://canned; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def _maitred(place: Place, *more: str) -> Sequence[str]:
    team = {"limits": BUDGETS, "keys": {"one": {"secret": {"env": "BENCH_KEY"}, "limits": KEY_LIMITS}}}
    config = {
        "log": {"level": "warning"},
        "store": {"folder": str(place.folder / "data")},
        "models": {name: {"upstreams": [{"url": f"{place.upstream_url}/v1"}]} for name in MODELS},
        "admission": {"prices": {"*": {"prompt": 0.5, "cached": 0.05, "output": 1.5}}},
        "tenants": {"acme": {"limits": BUDGETS, "teams": {"kitchen": team}}},
    }
    (place.folder / "maitred.yaml").write_text(json.dumps(config))
    served = (sys.executable, "-m", "maitred", "serve", "--config", "maitred.yaml")
    return [*served, "--port", str(place.port), *more]


def _bare(place: Place) -> Sequence[str]:
    command = (sys.executable, "-m", "benchmarks.support.gateways.pass_through")
    return [*command, "--upstream", place.upstream_url, "--port", str(place.port)]


def _litellm(place: Place) -> Sequence[str]:
    target = {"api_base": f"{place.upstream_url}/v1", "api_key": "none"}
    config = {
        "model_list": [
            {"model_name": name, "litellm_params": {"model": f"openai/{name}", **target}} for name in MODELS
        ],
        "general_settings": {"master_key": "os.environ/BENCH_KEY"},
        "litellm_settings": {"request_timeout": 600, "set_verbose": False, "json_logs": True},
    }
    (place.folder / "litellm.yaml").write_text(json.dumps(config))
    served = (str(_LITELLM.place / "bin" / "litellm"), "--config", "litellm.yaml", "--num_workers", "1")
    return [*served, "--host", "127.0.0.1", "--port", str(place.port)]


def _portkey(place: Place) -> Sequence[str]:
    return ["node", str(_PORTKEY_STARTS), f"--port={place.port}", "--headless"]


def _portkey_headers(place: Place) -> Mapping[str, str]:
    return {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{place.upstream_url}/v1"}


def _install_portkey() -> None:
    _PORTKEY.mkdir(parents=True, exist_ok=True)
    (_PORTKEY / "package.json").write_text(json.dumps(_PORTKEY_PACKAGE))
    subprocess.run(["npm", "install", "--no-fund", "--no-audit"], cwd=_PORTKEY, check=True)


def _nginx(place: Place) -> Sequence[str]:
    path = place.folder / "nginx.conf"
    path.write_text(_NGINX.format(folder=place.folder, upstream=place.upstream, port=place.port, key=KEY))
    return [shutil.which("nginx") or "nginx", "-p", str(place.folder), "-c", str(path), "-e", "stderr"]


def _nginx_how() -> str:
    version = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
    return f"nginx {version.strip().rpartition('/')[2]}, one worker, no buffering, kept connections, the key compared"


CONTENDERS = (
    Contender(
        "maitred",
        lambda: "one process; team of an organisation, limits, budgets, prices, ledger, metrics, stories",
        _maitred,
    ),
    Contender(
        "workers",
        lambda: "maitred with two workers and a controller, on both cores, which it shares with client and upstream",
        lambda place: _maitred(place, "--workers", "2"),
        cores=2,
    ),
    Contender(
        "litellm",
        lambda: (
            f"LiteLLM {_LITELLM.version}, one worker, LITELLM_MODE=PRODUCTION, errors alone logged, the master key "
            "(keys of teams need a database), no callbacks"
        ),
        _litellm,
        environment={
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "NO_DOCS": "True",
        },
        installed=lambda: _LITELLM.installed,
        install=_LITELLM.install,
    ),
    Contender(
        "portkey",
        lambda: f"Portkey gateway {_PORTKEY_VERSION}, Node.js, headless; it checks no keys",
        _portkey,
        environment={"NODE_ENV": "production"},
        headers=_portkey_headers,
        installed=_PORTKEY_STARTS.exists,
        install=_install_portkey,
        checks_keys=False,
    ),
    Contender("nginx", _nginx_how, _nginx, installed=lambda: shutil.which("nginx") is not None),
    Contender("bare", lambda: "uvicorn, httptools, uvloop, aiohttp; the key's hash in a set", _bare),
)
