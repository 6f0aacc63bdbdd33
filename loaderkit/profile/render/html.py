"""The report as one HTML file that loads nothing over the network: the JavaScript for its charts (Vega-Lite) is inside it.

report ──charts──> Vega-Lite descriptions ─┐
   └──────────────> report.html.j2 ────────┴──> one page; names of samples are data in it, and never markup
"""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType

from loaderkit._internal.config.yaml_text import to_yaml
from loaderkit._internal.units import say_seconds
from loaderkit.errors import ConfigError
from loaderkit.profile.compare import say
from loaderkit.profile.ranks import Merged
from loaderkit.profile.render.charts import charts, legend
from loaderkit.profile.render.ported import say_ported
from loaderkit.profile.render.saves import saving_advice
from loaderkit.profile.report import Report


def why_no_html() -> str | None:
    """The reason why HTML cannot be written; None if it can."""
    try:
        _libraries()
    except ConfigError as error:
        return str(error)
    return None


def to_html(report: Report, ranks: Merged | None = None) -> str:
    """The page. With `ranks` it is on the whole job; `report` is one of its ranks. Raises ConfigError where
    `loaderkit[profile]` is not installed."""
    jinja2, _ = _libraries()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("loaderkit.profile", ""), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "s": _s,
        "ms": _ms,
        "percent": _percent,
        "number": _number,
        "yaml": partial(to_yaml, flow=False),
    }
    drawn = charts(report)
    page: str = environment.get_template("report.html.j2").render(
        report=report,
        compared=[(row, say(row)) for row in report.baseline.rows] if report.baseline is not None else [],
        ranks=ranks,
        parts=report.steps.parts(),
        saving=saving_advice(report),
        ported=[] if report.ported is None else say_ported(report.ported),
        waits=_waits(report),
        first=_first(report),
        charts=drawn,
        legends={name: legend(spec) for name, spec in drawn.items()},
        script=_script(),
    )
    return page


def _libraries() -> tuple[ModuleType, ModuleType]:
    try:
        import jinja2
        import vl_convert
    except ImportError as error:
        raise ConfigError(
            f"a report as HTML needs what is not installed ({error.name}): pip install 'loaderkit[profile]', or write it as "
            "--json"
        ) from error
    return jinja2, vl_convert


@cache
def _script() -> str:
    """The JavaScript that draws the charts: 0.9 MB, bundled in 2 s. No tag ends within it."""
    _, vl_convert = _libraries()
    bundle: str = vl_convert.javascript_bundle()  # window.vegaEmbed
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


# ------------------------------------------------------------------------------------------- parts of the page


def _waits(report: Report) -> list[tuple[str, float, float]]:
    """(cause, seconds, percent of the loop's time), the longest first."""
    least_s = 0.005 * report.stall.total_s
    return [(name, s, 100 * s / report.wall_s) for name, s in report.stall.by_stage.items() if s and s >= least_s]


def _first(report: Report) -> list[tuple[str, float, float]]:
    """(part, seconds, percent) of the time until the first batch."""
    first = report.first_batch
    if first is None:
        return []
    named = {"import": first.import_s, "list": first.list_s, "index": first.index_s, "workers": first.workers_s}
    waits = {**named, **{f"waited for {name}": seconds for name, seconds in first.by_stage.items()}}
    whole_s = max(first.total_s, 1e-9)
    return [(name, s, 100 * s / whole_s) for name, s in waits.items() if s]


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else say_seconds(seconds)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:+.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
