#!/usr/bin/env bash
# Runs a command on a machine with an RDMA device, on one that has none: a virtual one.
#
#   guest.sh KERNEL-FOLDER COMMAND...
#
# QEMU emulates the machine in software (no KVM: nested machines hang with it), with Debian's
# kernel, this system's rdma-core and busybox, and `rdma_rxe`, which does RoCE over any network
# interface, here a dummy one. COMMAND is a shell script of the guest; every file named in FILES
# (separated by blanks) lies in its folder. Device and address are in $RXE_DEV and $RXE_ADDR.
#
# Needs Debian on amd64 with qemu-system-x86, ibverbs-providers, iproute2, busybox-static, cpio and
# kmod; the kernel package is downloaded into KERNEL-FOLDER once (70 MB). Prints what the guest
# prints. Exit status: that of COMMAND; 3 if something is missing here, with a line that says what;
# 124 after $LIMIT seconds (300).
#
# Notes for whoever changes it: rdma_rxe fails to add a device with no word about why unless
# crc32_generic is loaded before. The kernel package has no modules.dep. libibverbs loads its
# provider from a folder that ldd does not know of.
set -euo pipefail

lack() { echo "guest: $*" >&2; exit 3; }
[ $# -ge 2 ] || lack "usage: guest.sh KERNEL-FOLDER COMMAND..."
store=$1
shift
[ "$(dpkg --print-architecture 2>/dev/null || true)" = amd64 ] || lack "not Debian on amd64"
for tool in qemu-system-x86_64 rdma busybox cpio depmod dpkg gzip; do
  command -v "$tool" >/dev/null || lack "no $tool"
done
[ -e /etc/libibverbs.d/rxe.driver ] || lack "no ibverbs-providers"
libs=$(dirname "$(ldconfig -p | awk '/libibverbs\.so\.1 .*x86-64/{print $NF; exit}')")
[ -e "$libs/libibverbs.so.1" ] || lack "no libibverbs.so.1"

work=$(mktemp -d)
emulator=
trap '[ -z "$emulator" ] || kill "$emulator" 2>/dev/null || true; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# The kernel, unpacked and never installed.
mkdir -p "$store"
package() { find "$store" -maxdepth 1 -name 'linux-image-*.deb' | sort | tail -n 1; }
if [ -z "$(package)" ]; then
  name=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends:/{print $2; exit}')
  [ -n "$name" ] || lack "linux-image-amd64 is in no package list (apt-get update)"
  (cd "$store" && timeout 300 apt-get download -qq -o APT::Sandbox::User=root "$name" >&2) ||
    lack "cannot download $name"
fi
kernel=$work/kernel
dpkg -x "$(package)" "$kernel"
image=$(find "$kernel/boot" -name 'vmlinuz-*' | head -n 1)
version=${image##*/vmlinuz-}
depmod -b "$kernel" "$version"

# The root folder.
root=$work/root
mkdir -p "$root"/{usr/bin,usr/lib,usr/lib64,proc,sys,dev,tmp,job,modules,etc/libibverbs.d}
for folder in bin lib lib64; do ln -s "usr/$folder" "$root/$folder"; done
ln -s usr/bin "$root/sbin"
# with_libraries FILE [FOLDER]: copies a file, to its own place unless told otherwise, and what it
# is linked to.
with_libraries() {
  local file=$1 to=${2:-$(dirname "$1")} library
  mkdir -p "$root$to"
  cp -L "$file" "$root$to/"
  for library in $(ldd "$file" 2>/dev/null | grep -o '/[^ ]*' || true); do
    [ -e "$root$library" ] || { mkdir -p "$root$(dirname "$library")"; cp -L "$library" "$root$library"; }
  done
}
with_libraries "$(command -v busybox)" /usr/bin
with_libraries "$(command -v rdma)" /usr/bin
cp /etc/libibverbs.d/rxe.driver "$root/etc/libibverbs.d/"
for library in "$libs"/libibverbs/librxe-rdmav*.so "$libs/libibverbs.so.1"; do
  with_libraries "$library"
done
for file in ${FILES:-}; do with_libraries "$file" /job; done
for module in crc32_generic ipv6 dummy rdma_rxe; do
  modprobe -d "$kernel" -S "$version" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++' | while read -r module; do
  cp "$module" "$root/modules/"
  basename "$module" >>"$root/modules/order"
done
printf '%s\n' "$*" >"$root/job/command"

cat >"$root/init" <<'INIT'
#!/usr/bin/busybox sh
# The first process. Console: ttyS0, a log. What the command prints: ttyS1.
export PATH=/usr/bin HOME=/job RXE_DEV=rxe0 RXE_ADDR=10.0.0.1
/usr/bin/busybox --install -s /usr/bin 2>/dev/null
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
ln -s /proc/self/fd /dev/fd
while read -r module; do insmod "/modules/$module" || echo "cannot load $module"; done </modules/order
ip link set lo up
ip link add dummy0 type dummy
ip addr add $RXE_ADDR/24 dev dummy0
ip link set dummy0 up
rdma link add $RXE_DEV type rxe netdev dummy0
ulimit -l unlimited
stty -F /dev/ttyS1 raw -echo
if [ -e /sys/class/infiniband/$RXE_DEV ]; then
  cd /job
  sh ./command </dev/null >/dev/ttyS1 2>&1
  echo "status of the command: $?"
fi
stty -F /dev/ttyS1 raw -echo # until the last byte is out
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$work/initrd"

console=$work/console
: >"$console"
timeout -k 5 "${LIMIT:-300}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 1024 \
  -kernel "$image" -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1" -no-reboot \
  -nodefaults -display none -serial "file:$console" -serial stdio </dev/null &
emulator=$!
ended=0
wait "$emulator" || ended=$?
emulator=
status=$(tr -d '\r' <"$console" | sed -n 's/^status of the command: \([0-9]*\)$/\1/p' | tail -n 1)
[ -z "$status" ] || exit "$status"
[ "$ended" != 124 ] || { echo "guest: no end after ${LIMIT:-300} s" >&2; exit 124; }
echo "guest: it did not come up; the end of its console:" >&2
tail -n 20 "$console" | tr -d '\r' >&2
exit 125
