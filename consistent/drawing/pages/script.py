"""JavaScript of a page: the light/dark button, search, sorting and the timeline."""

SCRIPT = r"""
"use strict";
const root = document.documentElement;
const dark = () => root.dataset.theme ? root.dataset.theme === "dark"
                                      : matchMedia("(prefers-color-scheme:dark)").matches;
if (/^#(dark|light)$/.test(location.hash)) root.dataset.theme = location.hash.slice(1);
document.getElementById("theme").onclick = () => {
  root.dataset.theme = dark() ? "light" : "dark";
  draw();
};

for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  for (const row of body.rows)
    [...row.cells].forEach((cell, i) => { cell.dataset.head = heads[i].textContent; });
  heads.forEach((head, column) => {
    head.firstElementChild.onclick = () => {
      const number = head.classList.contains("n");
      const down = head.ariaSort ? head.ariaSort === "ascending" : number;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = row => {
        const cell = row.cells[column];
        return number ? +(cell.dataset.n || 0) : cell.textContent.trim();
      };
      const sign = down ? -1 : 1;
      const order = (a, b) => number ? key(a) - key(b) : key(a).localeCompare(key(b));
      body.append(...[...body.rows].sort((a, b) => sign * order(a, b)));
    };
  });
}

const search = document.getElementById("search");
if (search) search.oninput = () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  const rows = [...document.querySelector("#lines tbody").rows];
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
    shown += !row.hidden;
  }
  document.getElementById("found").textContent =
    words.length ? `${shown} of ${rows.length} lines` : "";
};

// The timeline: lanes are [name, colour], events [number of the lane, name, begin, length or -1,
// where, detail, colour if it is not the lane's], times in microseconds.
const canvas = document.getElementById("time");
const drawn = canvas ? JSON.parse(document.getElementById("events").textContent) : {};
const events = drawn.events || [], lanes = drawn.lanes || [], TOP = 26;
const LANE = lanes.length > 6 ? 30 : 44, TALL = LANE - 12;
const MARGIN = 18 + 7.2 * Math.max(...lanes.map(lane => lane[0].length), 8);
if (canvas) canvas.style.height = TOP + lanes.length * LANE + 8 + "px";
const last = events.reduce((most, e) => Math.max(most, e[2] + Math.max(e[3], 0)), 1);
let from = 0, to = last, at = null;

function time(us) {
  return !us ? "0" : us >= 1e6 ? (us / 1e6).toPrecision(4) + " s"
       : us >= 1e3 ? (us / 1e3).toPrecision(4) + " ms" : us.toPrecision(3) + " us";
}

function draw() {
  if (!canvas) return;
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale; canvas.height = height * scale;
  const g = canvas.getContext("2d"), css = getComputedStyle(document.body);
  const colour = name => css.getPropertyValue(name).trim();
  g.scale(scale, scale); g.font = "12px " + css.fontFamily; g.textBaseline = "middle";
  const x = us => MARGIN + (us - from) / (to - from) * (width - MARGIN - 10);
  g.fillStyle = colour("--faint"); g.strokeStyle = colour("--line");
  const rough = (to - from) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(k => k >= rough);
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    g.beginPath(); g.moveTo(x(t), TOP - 6); g.lineTo(x(t), height); g.stroke();
    const text = time(t), end = x(t) + 3 + g.measureText(text).width;
    g.fillText(text, x(t) + 3 - Math.max(0, end - width + 6), 11);
  }
  lanes.forEach(([name], k) => {
    g.fillStyle = colour("--faint"); g.fillText(name, 10, TOP + k * LANE + TALL / 2);
  });
  g.save(); g.beginPath(); g.rect(MARGIN, 0, width - MARGIN, height); g.clip();
  for (const event of events) {
    if (event[2] > to || event[2] + Math.max(event[3], 0) < from) continue;
    const left = x(event[2]), long = event[3] < 0 ? 2 : x(event[2] + event[3]) - left;
    const y = TOP + event[0] * LANE;
    g.globalAlpha = at === event ? 1 : 0.82;
    g.fillStyle = colour(event[6] || lanes[event[0]][1]);
    g.fillRect(left, y, Math.max(long - (long > 3 ? 0.7 : 0), 0.8), TALL);
    if (long > 14 && event[6] !== "--line") {
      // The whole name where it fits, else its first word.
      const fits = text => g.measureText(text).width < long - 6;
      g.globalAlpha = 1; g.fillStyle = colour("--paper");
      g.fillText([event[1], event[1].split(" ")[0]].find(fits) || "", left + 4, y + TALL / 2);
    }
  }
  g.restore();
}

if (canvas) {
  const told = document.getElementById("told"), hint = told.textContent;
  const when = e => from + (e.offsetX - MARGIN) / (canvas.clientWidth - MARGIN - 10) * (to - from);
  const show = (a, b) => {
    const span = Math.min(Math.max(b - a, last / 1e5), last);
    from = Math.min(Math.max(a, 0), last - span); to = from + span; draw();
  };
  canvas.onwheel = e => {
    e.preventDefault();
    const t = when(e), k = Math.exp(e.deltaY / 300);
    show(t - (t - from) * k, t + (to - t) * k);
  };
  canvas.ondblclick = () => show(0, last);
  let drag = null;
  canvas.onpointerdown = e => {
    drag = [e.offsetX, from, to];
    canvas.setPointerCapture(e.pointerId);
  };
  canvas.onpointerup = () => { drag = null; };
  canvas.onpointermove = e => {
    if (drag) {
      const by = (drag[0] - e.offsetX) / (canvas.clientWidth - MARGIN - 10) * (drag[2] - drag[1]);
      return show(drag[1] + by, drag[2] + by);
    }
    const lane = Math.floor((e.offsetY - TOP) / LANE), t = when(e);
    const slack = (to - from) / canvas.clientWidth * 2;
    const hits = events.filter(v => v[0] === lane && v[2] - slack <= t
                                    && t <= v[2] + Math.max(v[3], 0) + slack);
    at = hits.pop() || null;
    told.textContent = !at ? hint : [at[1], at[3] < 0 ? "goes on beside the program" : time(at[3]),
                                     at[4], at[5]].filter(Boolean).join("  \u00b7  ");
    draw();
  };
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme:dark)").addEventListener("change", draw);
  draw();
}
"""
