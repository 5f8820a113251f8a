"""Shared by bar26, bar27, bar29, bar34, bar38 and bar39: runs the bars that are named, each within a time of its own.

A bar that fails, or takes too long, counts as missed, and the next one follows. What it started ends before that.
"""
import signal, traceback
import common32


class Late(SystemExit):
    pass


def _late(*_):
    raise Late("it took too long")


def parsed(parser, bars, long=()):
    """The arguments. `bars` has a function and its most seconds by name; those of `long` run only when they are named."""
    parser.add_argument("bars", nargs="*", metavar="BAR", help=f"{', '.join(bars)} [default: all but {', '.join(long) or 'none'}]")
    a = parser.parse_args()
    for name in a.bars:
        if name not in bars:
            parser.error(f"no bar {name!r}: there are {', '.join(bars)}")
    a.bars = a.bars or [name for name in bars if name not in long]
    return a


def play(names, bars):
    """Runs bars, and ends the script."""
    print(common32.load(), common32.BINARY, flush=True)
    signal.signal(signal.SIGALRM, _late)
    for name in names:
        function, seconds = bars[name]
        signal.alarm(seconds)
        try:
            function()
        except SystemExit as why:
            if str(why) == "ended by SIGTERM":
                raise
            _missed(name, f"{why} (limit {seconds} s)" if isinstance(why, Late) else why)
        except Exception as why:
            traceback.print_exc()
            _missed(name, repr(why))
        finally:
            signal.alarm(0)
            for child in common32._children:
                common32.kill(child)
    common32.end()


def _missed(name, why):
    print(f"bar {name}: not measured: {why} missed", flush=True)
    common32._missed.append(name)
