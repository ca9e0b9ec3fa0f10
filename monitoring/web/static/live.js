// Fills in a run's live page from its stream of changes: sections of HTML that the
// server has rendered and escaped, points of charts, and the bars of the timeline.
"use strict";

const byId = (id) => document.getElementById(id);
const charts = new Map();
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function showSections(sections) {
  for (const [id, html] of Object.entries(sections)) {
    const place = document.querySelector(`[data-section="${id}"]`);
    // A table that a person has scrolled stays where it is.
    const scrolled = [...place.querySelectorAll(".scroll, pre")].map((e) => [e.scrollLeft, e.scrollTop, e.scrollTop + e.clientHeight >= e.scrollHeight - 4]);
    place.innerHTML = html;
    place.querySelectorAll(".scroll, pre").forEach((e, index) => {
      const [left, top, atEnd] = scrolled[index] || [0, 0, true];
      e.scrollLeft = left;
      const newestLast = e.tagName === "PRE" || id === "rounds";
      e.scrollTop = newestLast && atEnd ? e.scrollHeight : top;
    });
  }
}

// Small steps need their digits: a run of few parameters sends 0.0031 MB in a round.
function mark(value) {
  return value === null ? "" : value.toLocaleString(undefined, { maximumSignificantDigits: 6 });
}

function makeChart(name, chart) {
  const card = element("figure", "card");
  card.append(element("h3", "", chart.title));
  const box = element("div", "plot-box");
  card.append(box);
  byId("charts").append(card);
  const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false } };
  const series = chart.lines.map(([label, line], index) => ({
    label, stroke: () => line || colour("--ink"), width: line ? 1.3 : 2.2, spanGaps: true,
    dash: label === "training" ? [5, 4] : undefined, points: { show: false },
    value: (_, value) => (value === null ? "-" : Number(value.toPrecision(4)).toString()),
  }));
  const plot = new uPlot({
    width: box.clientWidth || 300, height: 230, legend: { live: true, markers: { fill: (u, i) => u.series[i].stroke(u, i) } },
    scales: { x: { time: false }, y: chart.log ? { distr: 3 } : {} },
    cursor: { points: { size: 6 } },
    axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] }, { ...axis, size: 58, values: (_, splits) => splits.map(mark) }],
    series: [{ label: "round" }, ...series],
  }, [[], ...chart.lines.map(() => [])], box);
  const made = { card, plot, chart, lines: JSON.stringify(chart.lines), rows: [] };
  new ResizeObserver(() => {
    if (box.clientWidth) plot.setSize({ width: box.clientWidth, height: 230 });
    showLast(made);
  }).observe(box);
  return made;
}

// The legend has the newest values, unless the pointer is at others.
function showLast({ plot, rows }) {
  if (rows.length && !(plot.cursor.left >= 0)) plot.setLegend({ idx: rows.length - 1 });
}

function draw(known) {
  known.plot.setData([0, ...known.chart.lines.keys()].map((_, index) => known.rows.map((row) => row[index])));
  showLast(known);
}

function replaceChart(name, chart) {
  const known = charts.get(name);
  known.plot.destroy();
  const made = makeChart(name, chart);
  known.card.replaceWith(made.card);
  charts.set(name, made);
  return made;
}

function showCharts(changed, names) {
  for (const [name, { card, plot }] of [...charts]) {
    if (names.includes(name)) continue;
    plot.destroy();
    card.remove();
    charts.delete(name);
  }
  for (const [name, chart] of Object.entries(changed)) {
    let known = charts.get(name);
    if (known && known.lines !== JSON.stringify(chart.lines)) known = replaceChart(name, chart);
    else if (!known) charts.set(name, (known = makeChart(name, chart)));
    known.rows.length = chart.from;
    known.rows.push(...chart.rows);
    draw(known);
  }
}

function showTimeline(timeline) {
  const place = element("div", "bars");
  const scale = (seconds) => `${(100 * seconds) / (timeline.seconds || 1)}%`;
  const row = (name) => {
    const line = element("div", "row");
    const track = element("div");
    const label = element("span", "", name);
    label.title = name;
    line.append(label, track);
    place.append(line);
    return track;
  };
  const heads = row("");
  heads.parentElement.classList.add("rounds");
  let free = 0; // Two labels would cover each other.
  for (const [index, offset] of timeline.rounds) {
    const place = offset / (timeline.seconds || 1);
    if (place < free) continue;
    free = place + 70 / (byId("timeline").clientWidth || 700);
    const head = element("small", "", `round ${index}`);
    head.style.left = scale(offset);
    heads.append(head);
  }
  const tracks = timeline.rows.map(row);
  for (const [at, begin, seconds, phase] of timeline.bars) {
    const bar = element("i");
    bar.style.left = scale(begin);
    bar.style.width = scale(seconds);
    bar.style.background = timeline.colours[phase];
    bar.title = `${timeline.rows[at]}: ${phase}, ${seconds.toPrecision(3)} s`;
    tracks[at].append(bar);
  }
  const key = element("div", "key");
  for (const [phase, shade] of Object.entries(timeline.colours)) {
    const entry = element("span");
    const dot = element("i");
    dot.style.background = shade;
    entry.append(dot, phase);
    key.append(entry);
  }
  byId("timeline").replaceChildren(place, key);
}

function follow() {
  const source = new EventSource(`${location.pathname}/changes`);
  source.onopen = () => say("live");
  source.onerror = () => say(source.readyState === EventSource.CLOSED ? "closed" : "reconnecting", true);
  source.onmessage = (message) => {
    const change = JSON.parse(message.data);
    document.title = `${change.title} - crossfed`;
    showSections(change.sections);
    // Shown first: a chart is as wide as its place. A run that only evaluates has none.
    byId("charts").parentElement.hidden = !change.figures.length;
    showCharts(change.charts, change.figures);
    byId("timeline").parentElement.parentElement.hidden = !change.timeline;
    if (change.timeline) showTimeline(change.timeline);
    else byId("timeline").replaceChildren();
    say(change.state, ["interrupted", "deleted"].includes(change.state));
    const forms = [...document.querySelectorAll("nav form")];
    forms.forEach((form) => (form.hidden = form.dataset.state !== change.state));
    // With the run may end who serves this page, unless it can be resumed here.
    const goesOn = forms.some((form) => form.dataset.state === change.state);
    if (["ended", "stopped", "deleted"].includes(change.state) && !goesOn) source.close();
  };
}

function say(text, isGone = false) {
  byId("line").textContent = text;
  byId("line").classList.toggle("gone", isGone);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [name, { chart, rows }] of [...charts]) {
    const made = replaceChart(name, chart);
    made.rows = rows;
    draw(made);
  }
});
follow();
