#!/bin/bash
# Installs what building, testing and the quick start need, from Debian's packages. Run as root or with sudo.
set -euo pipefail

packages=(
  build-essential cmake ninja-build ccache pkg-config git
  libzmq3-dev cppzmq-dev libcapnp-dev capnproto libabsl-dev libgoogle-glog-dev libgtest-dev
  libgmock-dev libbenchmark-dev libgloo-dev libdnnl-dev libpcre2-dev libutf8proc-dev
  nlohmann-json3-dev libcli11-dev libxxhash-dev
  python3 python3-venv python3-pip
)
# Only the checks of the source need these: clang-format, clang-tidy.
[ "${1:-}" = --with-linters ] && packages+=(clang-format clang-tidy)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "All ${#packages[@]} packages are installed."
  exit 0
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "not root and no sudo: run as root: apt-get install ${missing[*]}" >&2; exit 1; }
  sudo=sudo
fi
echo "Installing ${#missing[@]} packages: ${missing[*]}"
$sudo apt-get update -qq
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
