#!/usr/bin/env bash
# Installs the programs that the integration tests start: each test runs its own, servers on free ports, and ends it.
#
# Does something only as root on Debian or Ubuntu, and only where one is missing; elsewhere it says what to install.
set -euo pipefail

# Program that must be on the path, or a file that must exist, and the package that brings it.
services=(
  "redis-server redis-server"
  "promtool prometheus"
  "/usr/lib/postgresql/*/bin/initdb postgresql"  # Debian keeps it off the path.
  "chromium chromium"  # The console's tests; it is a client, and starts no server.
)

packages=()
for service in "${services[@]}"; do
  read -r program package <<<"$service"
  command -v "$program" >/dev/null || compgen -G "$program" >/dev/null || packages+=("$package")
done
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "The integration tests need these programs, installed but not started: ${packages[*]}" >&2
  exit 0
fi

# Packages start what they install; the tests want the programs alone. A policy that is here already stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
