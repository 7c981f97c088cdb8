#!/bin/bash
# A relocatable bundle: deploy/bundle.sh OUTDIR BINARY...
# Makes OUTDIR/bin and OUTDIR/lib with the programs and the libraries they need, except what belongs
# to the target: glibc, libstdc++ and libgcc_s (at least as new as here; WITH_STDCXX=1 takes them
# along), the driver, and CUDA's own libraries, which are found by name (libcublasLt.so.13).
# Everything finds the rest through $ORIGIN, so the folder may lie anywhere. Needs patchelf.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: deploy/bundle.sh OUTDIR BINARY..." >&2; exit 2; }
command -v patchelf > /dev/null || { echo "patchelf is missing; install it" >&2; exit 1; }
out=$1; shift
rm -rf "$out"
mkdir -p "$out/bin" "$out/lib"
skip='^(linux-vdso|ld-linux|libc\.so|libm\.so|libdl\.so|libpthread\.so|librt\.so|libresolv\.so'
skip+='|libutil\.so|libnsl\.so|libanl\.so|libmvec\.so|libcuda\.so|libcudart|libcublas|libnccl'
skip+='|libnvrtc|libnvidia|libnvJitLink)'
[ -n "${WITH_STDCXX:-}" ] || skip+='|^(libstdc\+\+|libgcc_s)'
unresolved=$(ldd "$@" | grep 'not found' || true)
[ -z "$unresolved" ] || { echo "libraries are missing: $unresolved" >&2; exit 1; }
cp -L "$@" "$out/bin/"
for binary in "$@"; do ldd "$binary"; done | awk '/=> \//{print $1, $3}' | sort -u |
  while read -r name path; do
    grep -qE "$skip" <<<"$name" || cp -L "$path" "$out/lib/$name"
  done
chmod u+w "$out"/bin/* "$out"/lib/*
strip --strip-unneeded "$out"/bin/* "$out"/lib/*
# A library's own RUNPATH is what its needs are looked for in; a program's is not inherited.
for binary in "$out"/bin/*; do patchelf --set-rpath '$ORIGIN/../lib' "$binary"; done
for library in "$out"/lib/*; do patchelf --set-rpath '$ORIGIN' "$library"; done
# What the target's own libraries must offer.
for version in GLIBC_2 GLIBCXX_3 CXXABI_1; do
  objdump -T "$out"/bin/* "$out"/lib/* 2>/dev/null | grep -oE "$version\.[0-9.]+" | sort -uV | tail -1
done | tr '\n' ' '
du -shc "$out/bin" "$out/lib" | tr '\n' ' '
echo
