// Shows the snapshots that the monitor sends. What peers say of themselves is set as text, and never as markup.
"use strict";

const PHASES = ["computing", "waiting", "matchmaking", "exchange", "step"];
const NAMES = { exchange: "bytes" };
const COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#ff9da6", "#9d755d", "#8c8c8c"];
const MARKS = ["#e6194b", "#3cb44b", "#ffe119", "#4363d8", "#f58231", "#911eb4", "#42d4f4", "#f032e6",
  "#bfef45", "#fabed4", "#469990", "#dcbeff", "#9a6324", "#800000", "#808000", "#000075"];
const at = (id) => document.getElementById(id);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

const seconds = (value) => value < 10 ? value.toFixed(2) + " s" : value.toFixed(0) + " s";
const rate = (value) => (value / 1e6).toFixed(2) + " MB/s";
const clock = (value) => new Date(value * 1000).toLocaleTimeString();

function big(value) {
  if (value >= 1e15) return value.toExponential(1);  // as no run has, but a record may
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (value >= 10 * size) return (value / size).toFixed(1) + unit;
  return value.toFixed(value < 100 && value % 1 ? 1 : 0);
}

function bar(target, legend, parts) {
  at(target).replaceChildren(...parts.filter((part) => part.colour).map((part) => {
    const piece = make("i");
    piece.style.width = 100 * part.share + "%";
    piece.style.background = part.colour;
    piece.title = part.text;
    return piece;
  }));
  at(legend).replaceChildren(...parts.map((part) => {
    const item = make("li"), dot = make("i");
    dot.style.background = part.colour || "var(--line)";
    item.append(dot, part.text);
    return item;
  }));
}

function figures(run) {
  const all = [
    ["epoch", run.epoch], ["an epoch", run.epoch_seconds ? seconds(run.epoch_seconds) : "…"],
    ["loss", run.loss === null ? "…" : run.loss.toFixed(4)], [`${run.counted} a second`, run.samples_per_second.toFixed(1)],
    ["samples in all", big(run.samples_behind)],
    ["peers", run.peers.filter((peer) => peer.standing === "here").length],
  ];
  at("figures").replaceChildren(...all.map(([name, value]) => {
    const box = make("div");
    box.append(make("b", String(value)), make("span", name));
    box.dataset.name = name;
    return box;
  }));
}

function epoch(run) {
  // Records are up to 10 s old: of a shorter epoch they do not say how far it has come.
  const isLong = run.epoch_seconds > 20;
  const pace = run.epoch_seconds ? ` in ${seconds(run.epoch_seconds)}` : "";
  at("pace").textContent = run.counted === "samples" ? "samples/s" : "steps/s";
  at("epochtitle").textContent = isLong
    ? `Epoch ${run.epoch}: ${run.samples.toFixed(0)} of ${run.target.toFixed(0)} ${run.counted}`
    : `Epoch ${run.epoch}: ${run.target.toFixed(0)} ${run.counted}${pace}`;
  const done = make("i");
  done.style.width = (run.target ? Math.min(100, 100 * run.samples / run.target) : 0) + "%";
  done.style.background = style("--accent");
  at("progress").replaceChildren(done);
  at("progress").hidden = !isLong;
  const peers = run.peers.filter((peer) => peer.standing === "here" || peer.standing === "silent");
  bar("brings", "bringers", peers.map((peer, index) => ({
    share: peer.share, colour: COLOURS[index % COLOURS.length],
    text: `…${peer.name} brings ${(100 * peer.share).toFixed(0)}%` + (isLong ? `, has ${peer.samples.toFixed(0)}` : ""),
  })));
}

function phases(run) {
  const spent = run.phases || {};
  const whole = PHASES.reduce((sum, name) => sum + (spent[name] || 0), 0);
  bar("phases", "phaselegend", whole ? PHASES.map((name) => ({
    share: spent[name] / whole, colour: style("--" + name),
    text: `${NAMES[name] || name} ${seconds(spent[name])}`,
  })) : []);
  at("advice").textContent = run.advice || (whole ? "" : "No round yet.");
}

function row(peer) {
  const line = make("tr", undefined, peer.standing);
  line.dataset.peer = peer.id;
  const cell = (text, name, kind) => {
    const made = make("td", text, kind);
    if (name) made.dataset.name = name;
    line.append(made);
    return made;
  };
  cell("…" + peer.name).title = peer.id;
  cell(peer.standing === "here" ? (peer.joining ? "joining" : peer.role) : peer.standing, "", "standing " + peer.standing);
  cell(String(peer.epoch), "epoch");
  cell(peer.loss === null ? "" : peer.loss.toFixed(4), "loss");
  cell(peer.samples_per_second.toFixed(1), "samples/s");
  cell((100 * peer.share).toFixed(0) + "%", "share");
  cell(rate(peer.up), "up");
  cell(rate(peer.down), "down");
  cell(String(peer.members), "sees");
  cell(peer.seen.toFixed(0) + " s", "seen");
  const bits = cell("", "bits", "bits");
  for (const digit of peer.mark.slice(0, 4)) {
    const square = make("i");
    square.style.background = MARKS[parseInt(digit, 16)];
    bits.append(square);
  }
  bits.title = peer.mark ? `epoch ${peer.mark_epoch}: ${peer.mark}` : "";
  const wrong = peer.findings.map((finding) => finding.trouble + (finding.detail ? ` (${finding.detail})` : ""));
  const runs = `${peer.version}, torch ${peer.torch}, ${peer.device}`;
  cell(wrong.length ? wrong.join("; ") : peer.joining || runs, "", wrong.length ? "wrong" : "").title = runs;
  return line;
}

function show(run) {
  at("sentence").textContent = run.sentence;
  at("sentence").className = run.is_well ? "well" : "ill";
  at("about").textContent = `${run.run_id} · ${clock(run.at)}`;
  document.title = `${run.is_well ? "●" : "▲"} ${run.run_id} · Shoal`;
  figures(run);
  epoch(run);
  phases(run);
  document.querySelector("#peers tbody").replaceChildren(...run.peers.map(row));
  at("happenings").replaceChildren(...run.happenings.slice().reverse().map((event) => {
    const item = make("li");
    item.append(make("time", clock(event.at)), `…${event.peer} ${event.what}`);
    return item;
  }));
}

// -- charts

let hours = 1, against = "at", past = null, charts = [];

function chart(target, key, label, colour) {
  const box = at(target), axis = { stroke: style("--quiet"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false } };
  const isTime = against === "at" || target === "speed";
  const xs = past[isTime ? "at" : "samples_behind"];
  // A line over samples may go back, where a run went on from an older state: uPlot wants them in order.
  const span = xs[xs.length - 1] - xs[0], day = { month: "short", day: "numeric" };
  const hour = { hour: "2-digit", minute: "2-digit", hour12: false, ...(span < 600 ? { second: "2-digit" } : {}) };
  const time = (tick) => new Date(tick * 1000).toLocaleString([], span > 2 * 86400 ? day : hour);
  const order = xs.map((_, index) => index).sort((a, b) => xs[a] - xs[b] || a - b);
  const data = [order.map((index) => xs[index]), order.map((index) => past[key][index])];
  box.replaceChildren();
  return new uPlot({
    width: box.clientWidth, height: box.clientHeight - 32, scales: { x: { time: isTime } },
    axes: [{ ...axis, space: 80, values: (_, ticks) => ticks.map(isTime ? time : big) }, { ...axis, size: 56 }],
    series: [isTime ? {} : { label: "samples" }, { label, stroke: colour, width: 1.5, spanGaps: true, points: { show: xs.length < 40 } }],
  }, data, box);
}

function draw() {
  charts.forEach((each) => each.destroy());
  charts = [];
  if (!past || !past.at.length) return;
  const told = past.loss.some((loss) => loss !== null);
  at("noloss").hidden = told;
  at("loss").hidden = !told;
  if (told) charts.push(chart("loss", "loss", "loss", style("--accent")));
  charts.push(chart("speed", "samples_per_second", at("pace").textContent, style("--computing")));
}

async function load() {
  const answer = await fetch(`/history?hours=${hours}`);
  if (!answer.ok) return;
  past = await answer.json();
  draw();
}

function choose(group, pick) {
  at(group).addEventListener("click", (event) => {
    if (event.target.tagName !== "BUTTON") return;
    for (const button of at(group).children) button.setAttribute("aria-pressed", String(button === event.target));
    pick(event.target.dataset);
  });
}
choose("against", (data) => { against = data.x; draw(); });
choose("range", (data) => { hours = Number(data.hours); load(); });
let drawing = 0;
addEventListener("resize", () => { cancelAnimationFrame(drawing); drawing = requestAnimationFrame(draw); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// -- what the monitor sends

const ASK_SECONDS = 5;
const events = new EventSource("/events");
events.onmessage = (event) => show(JSON.parse(event.data));
events.onerror = () => {
  // Who is refused, since as many look already as the monitor sends events to, asks instead.
  if (events.readyState === EventSource.CLOSED) ask();
  else away();
};

function away() {
  at("sentence").className = "unknown";
  at("about").textContent = "The monitor does not answer: what follows is how the run was.";
}

async function ask() {
  try {
    const run = await (await fetch("/snapshot")).json();
    if (run) {
      show(run);
      at("about").append(` · many look at this run, so this page asks every ${ASK_SECONDS} s`);
    }
  } catch {
    away();
  }
  setTimeout(ask, 1000 * ASK_SECONDS);
}
load();
setInterval(load, 10000);
