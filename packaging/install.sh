#!/bin/sh
# Installs paceline from a release, without Rust, or removes it.
#
#   sh install.sh [--from FOLDER|ADDRESS] [--prefix DIR]
#   sh install.sh --uninstall [--prefix DIR]
#
# A release has SHA256SUMS, its signature by minisign, and an archive for each system. The archive's hash
# must be in SHA256SUMS. The signature is checked by minisign or OpenSSL 3, where one of them is installed.
# PREFIX/lib/paceline/installed lists the files, and the folders that were made. --uninstall removes them, the service, and all in
# $PACELINE_HOME but models and own findings.
set -eu

# Filled in by packaging/release.py: where releases are, and the public key that signs them.
from='@FROM@'
key='@KEY@'

if [ "$(id -u)" = 0 ]; then prefix=/usr/local; else prefix=$HOME/.local; fi
uninstall=

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --from) from=${2:?--from needs a folder or an address}; shift 2 ;;
        --prefix) prefix=${2:?--prefix needs a folder}; shift 2 ;;
        --uninstall) uninstall=1; shift ;;
        *) fail "unknown option $1; see the head of this file" ;;
    esac
done
own=lib/paceline
list=$prefix/$own/installed

# remove_files LIST: the files of a list.
remove_files() {
    grep -v '^#' "$1" | while read -r file; do
        case $file in /* | *..*) continue ;; esac
        rm -f "$prefix/$file"
    done
}

# make_folder PATH: the folder, below the prefix; the names of those that were missing go to $work/made.
make_folder() {
    [ ! -d "$prefix/$1" ] || return 0
    make_folder "$(dirname "$1")"
    mkdir "$prefix/$1"
    echo "$1" >>"$work/made"
}

# forget FOLDER: all of a home but models and own findings.
forget() {
    [ -d "$1" ] || return 0
    find "$1" -mindepth 1 -maxdepth 1 ! -name models ! -name kb -exec rm -rf {} +
    rmdir "$1" 2>/dev/null || echo "kept: $1, with models or findings"
}

if [ -n "$uninstall" ]; then
    [ -f "$list" ] || fail "$list is missing: install.sh did not install into $prefix"
    program=$prefix/bin/paceline
    "$program" service remove >/dev/null 2>&1 || true
    if [ "$(id -u)" = 0 ]; then
        "$program" service remove --system >/dev/null 2>&1 || true
    fi
    if "$program" nodes >/dev/null 2>&1; then fail "this machine's node runs: stop it first"; fi
    remove_files "$list"
    folders=$(sed -n 's/^# folder //p' "$list" | LC_ALL=C sort -r)
    rm -f "$list"
    # A folder with files of others stays.
    for folder in $folders; do rmdir "$prefix/$folder" 2>/dev/null || true; done
    forget "${PACELINE_HOME:-$HOME/.paceline}"
    if [ "$(id -u)" = 0 ]; then forget /var/lib/paceline; fi
    echo "paceline is removed from $prefix"
    exit 0
fi

# Beside the files of a release, this script installs them.
case $from in
    @*) from=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
        [ -f "$from/SHA256SUMS" ] || fail "where is the release? --from FOLDER or --from ADDRESS" ;;
esac
case $key in @*) key= ;; esac

case $(uname -s)-$(uname -m) in
    Linux-x86_64 | Linux-amd64) platform=linux-x86_64 ;;
    Linux-aarch64 | Linux-arm64) platform=linux-aarch64 ;;
    Darwin-arm64) platform=darwin-arm64 ;;
    *) fail "no release for $(uname -s) on $(uname -m): build it, see README.md" ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM HUP

# get NAME: a file of the release into $work; fails quietly.
get() {
    case $from in
        https://* | http://*)
            if command -v curl >/dev/null; then
                curl -fsSL --retry 3 -o "$work/$1" "$from/$1" 2>/dev/null
            elif command -v wget >/dev/null; then
                wget -q -O "$work/$1" "$from/$1"
            else
                fail "neither curl nor wget is installed: fetch the release, then --from FOLDER"
            fi ;;
        *) cp "$from/$1" "$work/$1" 2>/dev/null ;;
    esac
}

# sha256 FILE: its hash.
sha256() {
    if command -v sha256sum >/dev/null; then
        sha256sum "$1"
    elif command -v shasum >/dev/null; then
        shasum -a 256 "$1"
    else
        openssl dgst -sha256 -r "$1"
    fi | cut -d' ' -f1
}

# by_openssl: the signature of minisign, an Ed25519 signature of the text's BLAKE2b-512 hash.
by_openssl() {
    printf '%s' "$key" | openssl base64 -d -A >"$work/key"
    sed -n 2p "$work/SHA256SUMS.minisig" | openssl base64 -d -A >"$work/signature"
    # Two bytes of the algorithm, eight of the key's id, then the key or the signature.
    [ "$(head -c 2 "$work/signature")" = ED ] || return 1
    head -c 10 "$work/key" | tail -c 8 >"$work/id"
    head -c 10 "$work/signature" | tail -c 8 | cmp -s - "$work/id" || return 1
    { printf '\060\052\060\005\006\003\053\145\160\003\041\000'; tail -c 32 "$work/key"; } >"$work/key.der"
    tail -c 64 "$work/signature" >"$work/bytes"
    openssl dgst -blake2b512 -binary "$work/SHA256SUMS" >"$work/hash"
    openssl pkeyutl -verify -pubin -inkey "$work/key.der" -keyform DER -rawin -in "$work/hash" \
        -sigfile "$work/bytes" >/dev/null 2>&1
}

get SHA256SUMS || fail "no SHA256SUMS at $from"
if [ -n "$key" ]; then
    get SHA256SUMS.minisig || fail "no SHA256SUMS.minisig at $from"
    if command -v minisign >/dev/null; then
        minisign -V -q -P "$key" -m "$work/SHA256SUMS" || fail "the signature of SHA256SUMS is wrong"
    elif openssl version 2>/dev/null | grep -q '^OpenSSL 3'; then
        by_openssl || fail "the signature of SHA256SUMS is wrong"
    else
        echo "the signature is not checked: neither minisign nor OpenSSL 3 is installed" >&2
    fi
fi

archive=$(sed -n "s/^[0-9a-f]\{64\}  \(paceline-[0-9][0-9.]*-$platform\.tar\.gz\)$/\1/p" "$work/SHA256SUMS")
[ -n "$archive" ] || fail "the release has no archive for $platform"
expected=$(sed -n "s/^\([0-9a-f]\{64\}\)  $archive$/\1/p" "$work/SHA256SUMS")
get "$archive" || fail "no $archive at $from"
got=$(sha256 "$work/$archive")
[ "$got" = "$expected" ] || fail "$archive: sha256 is $got, expected $expected"

mkdir "$work/new"
tar -xzf "$work/$archive" -C "$work/new" --strip-components 1
version=$("$work/new/bin/paceline" version) || fail "the program does not run here"

mkdir -p "$prefix" && [ -w "$prefix" ] || fail "cannot write to $prefix: choose a folder with --prefix"
: >"$work/made"
make_folder "$own"
(cd "$work/new" && find . -type f | sed 's|^\./||' | LC_ALL=C sort) >"$work/files"
if [ -f "$list" ]; then
    sed -n 's/^# folder //p' "$list" >>"$work/made"
    # Files that only the former release has.
    grep -v '^#' "$list" | LC_ALL=C sort | LC_ALL=C comm -23 - "$work/files" >"$work/former"
    remove_files "$work/former"
fi
while read -r file; do
    make_folder "$(dirname "$file")"
    # A program that runs cannot be written, but its name can be given to another file.
    cp -p "$work/new/$file" "$prefix/$file.new"
    mv -f "$prefix/$file.new" "$prefix/$file"
done <"$work/files"
{ echo "# from $from"; sed 's/^/# folder /' "$work/made"; cat "$work/files"; } >"$list"

echo "$version is in $prefix/bin"
case :$PATH: in
    *":$prefix/bin:"*) ;;
    *) echo "add it to PATH: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
echo "next: paceline doctor; paceline selftest; paceline run smollm2"
