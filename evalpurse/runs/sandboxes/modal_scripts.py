"""What runs inside a remote sandbox, in POSIX sh and with nothing but sh, tar, head and kill.

A supervisor runs the harness once and writes how it went into files; looks read them. A script that is run
after the harness travels with its command and never lies where a harness could change it. Times are seconds
of /proc/uptime, so that no clock has to agree with another.
"""

from __future__ import annotations

ROOT = "/evalpurse"

BOOT = 'mkdir -p "$1" && tar -xf - -C "$1" && exec sh "$1/run/start.sh" "$1"'
"""Unpacks what a sandbox needs from standard input and starts it.

The folder `claimed` is made once, so nothing starts twice.
"""

BOOT_SMALL = (
    'mkdir -p "$1" && printf %s "$2" | base64 -d | tar -xzf - -C "$1" && exec sh "$1/run/start.sh" "$1"'
)
"""The same for what fits beside the command: one call less, and most runs are small."""

# The list of processes that were there before the harness: nothing else may be alive after it.
START = r"""
root=$1; run=$root/run
mkdir "$run/claimed" 2>/dev/null || { echo again; exit 0; }
mkdir -p "$root/source" "$root/out" "$root/tmp" "$root/case"
if [ -f "$run/apply.sh" ]; then
  sh "$run/apply.sh" "$root" >"$run/apply.log" 2>&1 </dev/null || {
    echo "failed apply"; tail -c 2000 "$run/apply.log"; exit 0; }
  rm -f "$run/source.tar"
fi
before=
for d in /proc/[0-9]*; do
  read -r line 2>/dev/null <"$d/stat" || continue
  set -- ${line##*) }
  before="$before ${d#/proc/}:${20}"
done
if command -v setsid >/dev/null 2>&1; then new=setsid; else new=; fi
$new sh "$run/supervise.sh" "$root" </dev/null >/dev/null 2>&1 &
read -r up _ </proc/uptime
echo "started $up$before"
"""

# A trap, unlike an ignored signal, is not inherited. The kernel picks the harness first when memory runs out.
SUPERVISE = r"""
root=$1; run=$root/run
trap : HUP INT TERM XFSZ
. "$run/limits.sh"
unset OLDPWD SHLVL
export HOME=$root/tmp TMPDIR=$root/tmp LANG=C.UTF-8
export EVALPURSE_CASE=$root/case EVALPURSE_OUT=$root/out EVALPURSE_PARAMS=$root/params.json
[ -d "$root/world" ] && export EVALPURSE_WORLD=$root/world
cd "$root/source"
note() { echo "$2" >"$run/$1.new" && mv "$run/$1.new" "$run/$1"; }
if [ -f "$run/restore.sh" ]; then
  sh "$run/restore.sh" >"$run/log" 2>&1 </dev/null || {
    [ -f "$run/verdict" ] || note verdict restore
    read -r up _ </proc/uptime; note ended "1 $up"; exit 0; }
fi
EVALPURSE_DEADLINE=$(date -u -d "@$(($(date +%s) + whole_s))" +%Y-%m-%dT%H:%M:%SZ); export EVALPURSE_DEADLINE
read -r up _ </proc/uptime
note begun "$$ $up"
if command -v setsid >/dev/null 2>&1; then new=setsid; group=-; else new=; group=; fi
(
  { echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null
  { ulimit -c 0; ulimit -S -t "$cpu_soft"; ulimit -H -t "$cpu_hard"; ulimit -f "$file_blocks"; } 2>/dev/null
  exec $new sh "$run/command.sh" </dev/null >>"$run/log" 2>&1
) & child=$!
(
  sleep "$timeout_s"; note verdict timeout
  kill -TERM "$group$child"; sleep "$grace_s"; kill -KILL "$group$child"
) </dev/null >/dev/null 2>&1 &
wait $child; code=$?
read -r up _ </proc/uptime
note ended "$code $up"
"""

# `sweep` ends all but this shell, what called it, and what was there before the harness. Where the folder is
# not at its own place this is no machine of its own (a test bed): there only marked processes are ended.
_SWEEP = r"""
chain() {
  mine=" $$ "; p=$$
  while read -r line 2>/dev/null <"/proc/$p/stat"; do
    set -- ${line##*) }; p=$2; mine="$mine$p "; [ "$p" -le 1 ] && break
  done
}
others() {
  for d in /proc/[0-9]*; do
    p=${d#/proc/}
    case $mine in *" $p "*) continue;; esac
    read -r line 2>/dev/null <"$d/stat" || continue
    set -- ${line##*) }
    case $1 in Z|X) continue;; esac
    [ "$2" = 2 ] && continue
    [ "$p" = "$spare" ] && continue
    case " $before " in *" $p:${20} "*) continue;; esac
    if [ "$private" = no ]; then
      tr '\0' '\n' 2>/dev/null <"$d/environ" | grep -qx "EVALPURSE_RUN=$name" || continue
    fi
    found="$found $p"
  done
}
sweep() {
  chain; tries=0
  while :; do
    found=; others
    [ -z "$found" ] && return 0
    kill -9 $found 2>/dev/null
    tries=$((tries + 1)); [ $tries -gt 100 ] && return 1
    [ $tries -gt 1 ] && sleep 0.05
  done
}
if [ "$root" = /eval""purse ]; then private=yes; else private=no; fi
spare=
"""

# $1 root, $2 name, $3 verdict to write and act on (or -), $4 processes before, $5 limits:
# answer metrics transcript artifacts log margin
LOOK = (
    r"""
root=$1; name=$2; verdict=$3; before=$4; limits=$5; run=$root/run
"""
    + _SWEEP
    + r"""
[ -d "$run/claimed" ] || { echo "state idle"; exit 0; }
if [ ! -f "$run/begun" ] && [ "$verdict" = - ] && [ ! -f "$run/ended" ]; then echo "state running"; exit 0; fi
pid=; begun=
[ -f "$run/begun" ] && read -r pid begun <"$run/begun"
if [ ! -f "$run/ended" ]; then
  if [ "$verdict" != - ]; then
    [ -f "$run/verdict" ] || echo "$verdict" >"$run/verdict"
    spare=$pid; sweep; n=0
    while [ ! -f "$run/ended" ] && [ $n -lt 40 ]; do sleep 0.05; n=$((n + 1)); done
    spare=
  elif kill -0 "$pid" 2>/dev/null; then
    read -r up _ </proc/uptime; echo "state running $begun $up"; exit 0
  else
    sleep 0.2
  fi
fi
if sweep; then swept=yes; else swept=no; fi
code=-; ended=-; why=-
[ -f "$run/ended" ] && read -r code ended <"$run/ended"
[ -f "$run/verdict" ] && read -r why <"$run/verdict"
read -r up _ </proc/uptime
oom=0
for f in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
  [ -f "$f" ] && while read -r k v; do [ "$k" = oom_kill ] && oom=$v; done <"$f"
done
set -- $limits
margin=$6; logs=$5; arts=$4
rm -rf "$run/leave"; mkdir "$run/leave" || exit 1
cut() {
  if [ -f "$root/out/$1" ] && [ ! -L "$root/out/$1" ]; then
    head -c $(($2 + margin + 1)) "$root/out/$1" >"$run/leave/$1"; fi
}
if [ -d "$root/out" ] && [ ! -L "$root/out" ]; then
  if [ -f "$root/out/answer.json" ] && [ ! -L "$root/out/answer.json" ]; then cut answer.json $1
  else cut answer.txt $1; fi
  cut metrics.json $2; cut transcript.jsonl $3
fi
size=0
if [ -f "$run/log" ] && [ ! -L "$run/log" ]; then
  size=$(($(wc -c <"$run/log")))
  if [ "$size" -le "$logs" ]; then head -c "$logs" "$run/log" >"$run/leave/log.head"
  else
    head -c $((logs / 2 + margin)) "$run/log" >"$run/leave/log.head"
    tail -c $((logs / 2 + margin)) "$run/log" >"$run/leave/log.tail"
  fi
fi
echo "state ended $swept $code ${begun:--} $ended $up $why $oom $size"
if [ "$arts" -gt 0 ] && [ -d "$root/out/artifacts" ] && [ ! -L "$root/out/artifacts" ] && [ ! -L "$root/out" ]
then tar -cf - -C "$run/leave" . -C "$root/out" artifacts 2>/dev/null
else tar -cf - -C "$run/leave" . ; fi
"""
)

# $1 root, $2 name, $3 processes before, $4 folder, $5 timeout, $6 log bytes, $7 most bytes of a fetched file,
# $8 names to fetch one a line, then the command. Its files come on standard input.
GRADE = (
    r"""
root=$1; name=$2; before=$3; folder=$4; timeout=$5; log=$6; most=$7; fetch=$8; shift 8
"""
    + _SWEEP
    + r"""
umask 077
mkdir "$folder" "$folder/work" "$folder/tmp" "$folder/back" && tar -xf - -C "$folder/work" || exit 1
if command -v setsid >/dev/null 2>&1; then new=setsid; group=-; else new=; group=; fi
(
  cd "$folder/work" || exit 1
  world=; [ -d "$root/world" ] && world=EVALPURSE_WORLD=$root/world
  exec env -i PATH="$PATH" HOME="$folder/tmp" TMPDIR="$folder/tmp" LANG=C.UTF-8 EVALPURSE_RUN="$name" \
    EVALPURSE_GRADER="$folder/work" EVALPURSE_SOURCE="$root/source" EVALPURSE_OUT="$root/out" \
    EVALPURSE_CASE="$root/case" ${world:+"$world"} $new "$@" </dev/null >"$folder/log" 2>&1
) & child=$!
( sleep "$timeout"; : >"$folder/late"; kill -KILL "$group$child" ) </dev/null >/dev/null 2>&1 & watch=$!
wait $child; code=$?
kill $watch 2>/dev/null
late=no; [ -f "$folder/late" ] && late=yes
if sweep; then swept=yes; else swept=no; fi
size=$(($(wc -c <"$folder/log")))
if [ "$size" -le "$log" ]; then head -c "$log" "$folder/log" >"$folder/back/log.head"
else
  head -c $((log / 2)) "$folder/log" >"$folder/back/log.head"
  tail -c $((log / 2)) "$folder/log" >"$folder/back/log.tail"
fi
mkdir "$folder/back/files"
printf '%s\n' "$fetch" | while read -r f; do
  [ -n "$f" ] || continue
  real=$(cd "$folder/work" && cd "$(dirname "$f")" 2>/dev/null && pwd -P) || continue
  case $real/ in "$(cd "$folder/work" && pwd -P)"/*) ;; *) continue;; esac
  if [ -f "$folder/work/$f" ] && [ ! -L "$folder/work/$f" ]; then
    mkdir -p "$folder/back/files/$(dirname "$f")"
    head -c "$most" "$folder/work/$f" >"$folder/back/files/$f"
  fi
done
echo "state graded $swept $code $late $size"
tar -cf - -C "$folder/back" .
rm -rf "$folder"
"""
)

TAIL = 'tail -c "$2" "$1/run/log" 2>/dev/null; exit 0'
"""The end of the harness's log, while it runs."""
