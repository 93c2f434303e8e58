"use strict";
// Draws the .chart elements of a page with uPlot, and renews a page that is live. See charts.py for the data.

const UNITS = {
  "": value => Number(value.toPrecision(3)).toString(),
  size: value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]),
  count: value => scaled(value, 1000, ["", "k", "M", "B", "T"]).trim(),
  seconds: value => {
    if (value < 0) return "-" + UNITS.seconds(-value);
    if (value < 0.9995e-3) return `${(value * 1e6).toFixed(0)} µs`;
    if (value < 0.9995) return `${Number((value * 1e3).toPrecision(3))} ms`;
    if (value < 59.95) return `${value.toFixed(1)} s`;
    const minutes = Math.floor(Math.round(value) / 60), two = number => String(number).padStart(2, "0");
    return minutes < 60 ? `${minutes} min ${two(Math.round(value) % 60)} s`
      : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  },
};

function scaled(value, base, names) {
  let scale = 0;
  while (Math.abs(value) / base ** scale >= base * 0.9995 && scale < names.length - 1) scale++;
  const shown = value / base ** scale;
  const digits = Number.isInteger(value) && !scale ? 0 : Math.abs(shown) >= 100 ? 0 : Math.abs(shown) >= 10 ? 1 : 2;
  return `${shown.toFixed(digits)} ${names[scale]}`;
}

/** Text of others, its control characters as escapes. */
const visible = text => text.replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
  character => "\\u" + character.charCodeAt(0).toString(16).padStart(4, "0"));

const tick = show => value => value == null ? "" : show(value).replace(/\.0+(?=\s|$)/, "").replace(/ 00 (s|min)$/, "");
const whole = value => value.toLocaleString("en-US", {maximumFractionDigits: 2});

/** The hours after which a run had done `steps`, by its clock [steps], [hours]; null outside of it. */
function hoursAt(clock, steps) {
  return steps.map(step => {
    const [at, hours] = clock;
    let low = 0, high = at.length - 1;
    if (!at.length || step < at[0] || step > at[high]) return null;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (at[middle] <= step) low = middle; else high = middle;
    }
    const span = at[high] - at[low];
    return hours[low] + (span ? (step - at[low]) / span * (hours[high] - hours[low]) : 0);
  });
}

/** What uPlot draws: [x, then y, low and high of each line], over the x of all lines. */
function aligned(chart, runs, byHours, byFactors) {
  const drawable = value => value == null || byFactors && value <= 0 ? null : value;
  const tables = chart.series.map(line => {
    const x = byHours ? hoursAt(runs[line.run].clock, line.x) : line.x;
    const rows = x.map((at, i) => [at, line.y[i], (line.low || line.y)[i], (line.high || line.y)[i]])
      .filter(row => row[0] != null).sort((a, b) => a[0] - b[0]);
    return [rows.map(row => row[0]), ...[1, 2, 3].map(column => rows.map(row => drawable(row[column])))];
  });
  return uPlot.join(tables);
}

/** The value of a line under the cursor in words, with the range that it stands for. */
function under(show, y, low, high) {
  if (y == null) return "";
  return low === high ? show(low) : `${show(y)} (${show(low)} to ${show(high)})`;
}

const states = new Map();  // by the title of a chart: what its reader has chosen; a live page keeps it
let byHours = false;

function element(tag, text, className) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className || "";
  return made;
}

function button(text, pressed, click) {
  const made = element("button", text);
  made.type = "button";
  if (pressed !== null) made.setAttribute("aria-pressed", String(pressed));
  made.addEventListener("click", click);
  return made;
}

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = index => colour(`--c${index % 8 + 1}`);

function axes(x, y) {
  const common = {stroke: colour("--soft"), font: "12px system-ui, sans-serif", grid: {stroke: colour("--grid"), width: 1},
    ticks: {show: false}};
  return [{...common, size: 30, ...x}, {...common, size: 64, ...y}];
}

function padded(byFactors, zero) {
  return (plot, low, high) => {
    if (low == null) return [byFactors ? 1 : 0, byFactors ? 10 : 1];
    if (byFactors) return [low / (high / low || 2) ** 0.06 / (low === high ? 2 : 1), high * (high / low || 2) ** 0.06 * (low === high ? 2 : 1)];
    const room = 0.06 * (high - low) || Math.abs(low) * 0.1 || 1;
    return [zero ? Math.min(0, low) : low - room, high + room];
  };
}

/** Round numbers on an axis that goes by factors, also where it spans less than ten. */
function factorTicks(binary) {
  return (plot, axis, low, high) => {
    const ticks = [], base = binary ? 2 : 10;
    if (high / low < 5) {
      const unit = binary ? 1024 ** Math.floor(Math.log(low) / Math.log(1024)) : 1;
      const rough = (high - low) / unit / 5, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].find(factor => factor * power >= rough) * power * unit;
      for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
      return ticks;
    }
    const every = Math.max(1, Math.ceil(Math.log(high / low) / Math.log(base) / 7));
    for (let power = Math.ceil(Math.log(low) / Math.log(base)); base ** power <= high; power++)
      for (const factor of every > 1 || binary ? [1] : [1, 2, 5])
        if (power % every === 0 && factor * base ** power <= high) ticks.push(factor * base ** power);
    return ticks;
  };
}

function sized(box, options, data) {
  const size = () => ({width: Math.max(200, box.clientWidth), height: options.height});
  const plot = new uPlot({...options, ...size(), legend: {show: false}}, data, box);
  new ResizeObserver(() => { if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize(size()); }).observe(box);
  return plot;
}

function drawLines(box, chart, runs) {
  const state = states.get(chart.title) || {log: chart.log, off: new Set(), zoom: null};
  states.set(chart.title, state);
  const show = UNITS[chart.unit], timed = chart.along === "step" && runs.length > 0 && runs.every(run => run.clock[0].length > 1);
  const inHours = byHours && timed, data = aligned(chart, runs, inHours, state.log);
  const tools = element("div", "", "tools"), place = element("span", ""), values = [];
  const redraw = () => drawLines(box, chart, runs);
  chart.series.forEach((line, i) => {
    const name = button(visible(line.name), null, () => {
      state.off[state.off.has(line.name) ? "delete" : "add"](line.name);
      redraw();
    });
    name.className = state.off.has(line.name) ? "name off" : "name";
    name.style.color = colourOf(i);
    name.title = "show or hide";
    values.push(element("b", ""));
    const label = element("span", "");
    label.append(name, " ", values[i]);
    tools.append(label);
  });
  const right = element("span", "", "right");
  right.append(place, button("log", state.log, () => { Object.assign(state, {log: !state.log, zoom: null}); redraw(); }));
  if (timed) right.append(button("hours", inHours, () => {
    byHours = !byHours;
    for (const other of states.values()) other.zoom = null;
    drawAll(document);
  }));
  right.append(button("reset", null, () => { state.zoom = null; redraw(); }));
  tools.append(right);
  const series = [{}], bands = [];
  chart.series.forEach((line, i) => {
    const stroke = colourOf(i), at = series.length, visible = !state.off.has(line.name);
    const single = line.x.length === 1 || line.dots;
    series.push({stroke, width: 2, show: visible, paths: single ? () => null : undefined, points: {show: single, size: 7, fill: stroke}});
    for (const edge of ["low", "high"])
      series.push({stroke: stroke + "66", width: 1, show: visible && Boolean(line[edge]), points: {show: false}});
    if (line.low) bands.push({series: [at + 2, at + 1], fill: stroke + "2e"});
  });
  const marks = inHours ? runs.map(run => hoursAt(run.clock, run.resumed)) : runs.map(run => run.resumed);
  const hooks = {
    setCursor: [plot => {
      const i = plot.cursor.idx, last = column => [...column].reverse().find(value => value != null);
      place.textContent = i == null ? "" : `${inHours ? "hour" : visible(chart.along)} ${whole(data[0][i])}`;
      chart.series.forEach((line, n) => {
        const columns = [1, 2, 3].map(column => data[3 * n + column]);
        values[n].textContent = i == null ? under(show, ...columns.map(last)) : under(show, ...columns.map(column => column[i]));
      });
    }],
    setSelect: [plot => {
      const {left, top, width, height} = plot.select;
      if (width > 0) state.zoom = {
        x: {min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x")},
        y: {min: plot.posToVal(top + height, "y"), max: plot.posToVal(top, "y")},
      };
    }],
    drawClear: [plot => {
      if (chart.along !== "step") return;
      const {ctx, bbox} = plot;
      ctx.save();
      ctx.strokeStyle = colour("--soft");
      ctx.setLineDash([4, 4]);
      for (const at of marks.flat()) {
        if (at == null || at < plot.scales.x.min || at > plot.scales.x.max) continue;
        const x = plot.valToPos(at, "x", true);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.restore();
    }],
  };
  const y = {values: (plot, ticks) => ticks.map(tick(show)), size: chart.unit === "seconds" ? 78 : 64};
  if (state.log) y.splits = factorTicks(chart.unit === "size");
  if (state.log) y.filter = (plot, ticks) => ticks;
  if (chart.unit === "size" && !state.log) y.incrs = Array.from({length: 60}, (_, power) => 2 ** power);
  const x = {label: inHours ? "hour" : visible(chart.along), labelSize: 16, labelFont: "12px system-ui, sans-serif", values: (plot, ticks) => ticks.map(whole)};
  if (!inHours) x.incrs = Array.from({length: 40}, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
  box.replaceChildren(tools);
  const plot = sized(box, {
    height: box.closest("figure:first-child") ? 330 : 220,
    scales: {x: {time: false}, y: {distr: state.log ? 3 : 1, range: padded(state.log, chart.zero)}},
    axes: axes(x, y),
    cursor: {drag: {x: true, y: true, uni: 30}, points: {size: 6}},
    series, bands, hooks,
  }, data);
  plot.over.addEventListener("dblclick", () => { state.zoom = null; });
  for (const key in state.zoom || {}) plot.setScale(key, state.zoom[key]);
}

const MARKS = {
  data: (ctx, x, y, r) => ctx.arc(x, y, r, 0, 2 * Math.PI),
  megatron: (ctx, x, y, r) => ctx.rect(x - 0.9 * r, y - 0.9 * r, 1.8 * r, 1.8 * r),
  fsp: (ctx, x, y, r) => polygon(ctx, [[x, y - 1.2 * r], [x + 1.2 * r, y], [x, y + 1.2 * r], [x - 1.2 * r, y]]),
  isp: (ctx, x, y, r) => polygon(ctx, [[x, y - 1.2 * r], [x + 1.2 * r, y + r], [x - 1.2 * r, y + r]]),
};
const MARK_COLOURS = {data: 0, megatron: 2, fsp: 4, isp: 3};

function polygon(ctx, corners) {
  corners.forEach(([x, y], i) => ctx[i ? "lineTo" : "moveTo"](x, y));
  ctx.closePath();
}

/** The layouts of the picture, by size, and the labels: the plan, and the fastest that fits of each other algorithm. */
function layouts(chart) {
  const points = chart.points.map(([y, x, fits, label, mark, chosen, frontier]) => ({
    x, y, fits, mark, frontier,
    kind: chosen ? "best" : frontier ? "edge" : fits ? "in" : "out",
    text: `${visible(label)}\n${UNITS.seconds(y)} per step, ${UNITS.size(x)} per rank${fits ? "" : ", does not fit"}`,
  })).sort((a, b) => a.x - b.x);
  const best = points.find(point => point.kind === "best"), fastest = new Map();
  for (const point of points)
    if (point.fits && point.y < (fastest.get(point.mark) || {y: Infinity}).y) fastest.set(point.mark, point);
  if (best) fastest.delete(best.mark);
  const labels = [...fastest].map(([mark, {x, y}]) => ({x, y, text: `${visible(chart.names[mark] || mark)} ${UNITS.seconds(y)}`}));
  if (best) labels.push({x: best.x, y: best.y, text: `this plan ${UNITS.seconds(best.y)}`});
  return [points, labels];
}

/** Layouts by bytes and seconds, both by factors; the front joined, the plan with a ring, labels below. */
function drawScatter(box, chart) {
  const [points, labelled] = layouts(chart), ratio = devicePixelRatio;
  const tip = element("pre", "");
  tip.hidden = true;
  const near = plot => {
    let best = null, least = 18 ** 2;
    for (const point of points) {
      const away = (plot.valToPos(point.x, "x") - plot.cursor.left) ** 2 + (plot.valToPos(point.y, "y") - plot.cursor.top) ** 2;
      if (away < least) [best, least] = [point, away];
    }
    return best;
  };
  const draw = plot => {
    const {ctx, bbox} = plot, at = point => [plot.valToPos(point.x, "x", true), plot.valToPos(point.y, "y", true)];
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${12.5 * ratio}px system-ui, sans-serif`;
    if (chart.limit) {
      const x = plot.valToPos(chart.limit, "x", true), right = x > bbox.left + bbox.width / 2;
      ctx.fillStyle = colour("--bad") + "10";
      ctx.fillRect(x, bbox.top, bbox.left + bbox.width - x, bbox.height);
      line(ctx, [[x, bbox.top], [x, bbox.top + bbox.height]], colour("--bad"), 1.5 * ratio, [5 * ratio, 4 * ratio]);
      text(ctx, `limit ${UNITS.size(chart.limit)}`, x + (right ? -6 : 6) * ratio, bbox.top + 14 * ratio, right, colour("--bad"));
    }
    const front = points.filter(point => point.frontier);
    line(ctx, front.map(at), colour("--ink") + "a6", 1.5 * ratio, []);
    for (const kind of ["out", "in", "edge", "best"])
      for (const point of points.filter(other => other.kind === kind)) {
        const [x, y] = at(point);
        ctx.beginPath();
        (MARKS[point.mark] || MARKS.data)(ctx, x, y, 4 * ratio);
        ctx.globalAlpha = kind === "in" ? 0.42 : kind === "out" ? 0.38 : 1;
        ctx.fillStyle = ctx.strokeStyle = colourOf(MARK_COLOURS[point.mark] || 0);
        ctx.lineWidth = ratio;
        ctx[kind === "out" ? "stroke" : "fill"]();
        ctx.globalAlpha = 1;
        if (kind !== "best") continue;
        ctx.beginPath();
        ctx.arc(x, y, 9 * ratio, 0, 2 * Math.PI);
        ctx.lineWidth = 2 * ratio;
        ctx.strokeStyle = colour("--ink");
        ctx.stroke();
      }
    labels(plot, at);
    ctx.restore();
  };
  const labels = (plot, at) => {
    // Below all marks, on one side of theirs, and in an order in which no leader crosses a text.
    const {ctx, bbox} = plot, left = labelled.map(at).reduce((sum, [x]) => sum + x - bbox.left, 0) > 0.45 * bbox.width * labelled.length;
    [...labelled].sort((a, b) => left ? a.x - b.x : b.x - a.x).forEach((label, i, all) => {
      const [x, y] = at(label), aside = x + (left ? -10 : 10) * ratio, down = bbox.top + bbox.height - (10 + 18 * (all.length - 1 - i)) * ratio;
      line(ctx, [[x, y], [aside, down]], colour("--soft"), ratio, []);
      text(ctx, label.text, aside + (left ? -4 : 4) * ratio, down + 4 * ratio, left, colour("--ink"));
    });
  };
  const below = (18 * labelled.length + 30) / 360;
  const range = (room, more) => (plot, low, high) => {
    if (low == null) return [1, 10];
    const factor = Math.max(high / low, 1.3);
    return [low / factor ** more, Math.max(high, low * factor) * factor ** room];
  };
  const limits = (plot, low, high) => range(0.1, 0.08)(plot, Math.min(low, chart.limit || low), Math.max(high, chart.limit || high));
  box.replaceChildren(tip);
  sized(box, {
    height: 420,
    scales: {x: {time: false, distr: 3, log: 2, range: limits}, y: {distr: 3, range: range(0.1, 1.1 * below / (1 - below))}},
    axes: axes(
      {values: (plot, ticks) => ticks.map(tick(UNITS.size)), splits: factorTicks(true), filter: (plot, ticks) => ticks},
      {size: 78, values: (plot, ticks) => ticks.map(tick(UNITS.seconds)), splits: factorTicks(false), filter: (plot, ticks) => ticks}),
    cursor: {drag: {x: true, y: true}, points: {show: false}},
    series: [{}, {paths: () => null, points: {show: false}}],
    hooks: {
      draw: [draw],
      setCursor: [plot => {
        const point = plot.cursor.left < 0 ? null : near(plot);
        tip.hidden = !point;
        if (!point) return;
        tip.textContent = point.text;
        tip.style.left = `${plot.over.offsetLeft + Math.min(plot.valToPos(point.x, "x"), plot.over.clientWidth - 200) + 12}px`;
        tip.style.top = `${plot.over.offsetTop + plot.valToPos(point.y, "y") + 12}px`;
      }],
    },
  }, [points.map(point => point.x), points.map(point => point.y)]);
}

function line(ctx, places, stroke, width, dash) {
  ctx.beginPath();
  places.forEach(([x, y], i) => ctx[i ? "lineTo" : "moveTo"](x, y));
  Object.assign(ctx, {strokeStyle: stroke, lineWidth: width});
  ctx.setLineDash(dash);
  ctx.stroke();
  ctx.setLineDash([]);
}

function text(ctx, words, x, y, right, fill) {
  Object.assign(ctx, {textAlign: right ? "right" : "left", lineWidth: 4 * devicePixelRatio, strokeStyle: colour("--paper"), fillStyle: fill});
  ctx.strokeText(words, x, y);
  ctx.fillText(words, x, y);
}

function drawAll(root) {
  const runs = JSON.parse(root.querySelector("main").dataset.runs || "[]");
  for (const box of root.querySelectorAll(".chart")) {
    const chart = JSON.parse(box.dataset.chart);
    if (chart.points) drawScatter(box, chart); else drawLines(box, chart, runs);
  }
}

async function renew() {
  if (document.hidden) return;
  const answer = await fetch(location.pathname).catch(() => null);
  if (!answer || !answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const open = [...document.querySelectorAll("details")].map(d => [d.querySelector("summary").textContent, d.open]);
  const next = page.querySelector("main");
  for (const d of next.querySelectorAll("details"))
    for (const [words, was] of open) if (d.querySelector("summary").textContent === words) d.open = was;
  document.querySelector("main").replaceWith(next);
  document.title = page.title;
  drawAll(document);
}

if (typeof document !== "undefined") {
  drawAll(document);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));
  if ("live" in document.querySelector("main").dataset) setInterval(renew, 3000);
}
