// Curves over steps, and bars of memory.
const PALETTE = ["#3b78c2", "#d1495b", "#2e8b57", "#b8860b", "#7b4fb5", "#008b8b", "#c2571a", "#6b7785"];

function shownNumber(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  return size >= 1e4 || size < 1e-2 ? value.toExponential(1) : `${+value.toPrecision(3)}`;
}

function tick(value, unit) {
  if (unit === "B") return gib(value);
  return unit === "s" && value ? duration(value * 1e6) : shownNumber(value);
}

function showChart(chart, place) {
  const [width, height, left, right, top, bottom] = [520, 220, 58, 10, 8, 24];
  const points = chart.curves.flatMap((curve) => curve.points);
  const steps = points.map(([step]) => step);
  const values = points.map(([, value]) => value).filter((value) => value !== null);
  const title = `${chart.title}${chart.unit ? ` (${chart.unit})` : ""}`;
  const card = make("figure", { class: "chart" }, make("h3", { text: title }));
  card.style.margin = "0";
  let [x0, x1] = [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))];
  let [y0, y1] = values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [0, 1];
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
  if (x0 === x1) x1 += 1;
  const x = (step) => left + ((step - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => top + (1 - (value - y0) / (y1 - y0)) * (height - top - bottom);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}, ${chart.curves.length} ranks, from ${shownNumber(y0)} to ${shownNumber(y1)}` });
  const yStep = niceStep(y1 - y0, 6);
  for (let value = Math.ceil(y0 / yStep) * yStep; value <= y1 + yStep * 1e-6; value += yStep) {
    svg.append(draw("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "axis" }));
    svg.append(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "faint" }, tick(Math.abs(value) < yStep * 1e-6 ? 0 : value, chart.unit)));
  }
  const xStep = Math.max(1, niceStep(x1 - x0, 6));
  for (let step = Math.ceil(x0 / xStep) * xStep; step <= x1; step += xStep) {
    svg.append(draw("text", { x: x(step), y: height - 8, "text-anchor": "middle", class: "faint" }, `${step}`));
  }
  chart.curves.forEach((curve, at) => {
    const color = PALETTE[at % PALETTE.length];
    let path = "";
    let isOpen = false;
    for (const [step, value] of curve.points) {
      if (value === null) {
        isOpen = false;
        svg.append(draw("text", { x: x(step), y: top + 10, "text-anchor": "middle", fill: "var(--error)" }, "✕"));
        continue;
      }
      path += `${isOpen ? "L" : "M"}${x(step).toFixed(1)},${y(value).toFixed(1)}`;
      isOpen = true;
    }
    const line = draw("path", { d: path || "M0,0", class: "curve", stroke: color, "stroke-opacity": chart.curves.length > 8 ? 0.45 : 0.9 });
    line.append(draw("title", {}, `rank ${curve.rank}`));
    svg.append(line);
  });
  card.append(svg);
  if (chart.curves.length <= 8) {
    const legend = make("div", { class: "legend" });
    chart.curves.forEach((curve, at) => {
      const swatch = make("span", { class: "swatch" });
      swatch.style.background = PALETTE[at % PALETTE.length];
      legend.append(make("span", {}, swatch, `rank ${curve.rank}`));
    });
    card.append(legend);
  } else {
    card.append(make("div", { class: "legend", text: `${chart.curves.length} ranks; point at a line for its rank` }));
  }
  if (points.length > values.length) card.append(make("div", { class: "legend", text: "✕: NaN or infinite" }));
  place.append(card);
}

function gib(bytes) {
  return bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(2)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`;
}

function showUsage(usage, place) {
  const most = Math.max(...usage.by_rank.map(([, bytes]) => bytes));
  const sorted = [...usage.by_rank].sort((a, b) => b[1] - a[1]);
  const shown = usage.by_rank.length <= 16 ? usage.by_rank : sorted.slice(0, 16);
  const table = make("div", { class: "usage" });
  for (const [rank, bytes] of shown) {
    const meter = make("meter", { min: 0, max: most, value: bytes });
    meter.setAttribute("aria-label", `rank ${rank}`);
    table.append(make("span", { text: `rank ${rank}` }), meter, make("span", { text: gib(bytes) }));
  }
  place.append(make("h3", { text: usage.title }), table);
  if (shown.length < sorted.length) {
    const middle = sorted[Math.floor(sorted.length / 2)][1];
    place.append(make("p", { class: "hint", text: `The 16 largest of ${sorted.length} ranks; the median is ${gib(middle)}, the smallest ${gib(sorted[sorted.length - 1][1])}.` }));
  }
}

for (const [charts, id] of [[DATA.charts, "curves-view"], [DATA.routing, "routing-view"]]) {
  if (!charts?.length) continue;
  const grid = make("div", { class: "charts" });
  charts.forEach((chart) => showChart(chart, grid));
  byId(id).append(grid);
}
if (DATA.usages?.length) DATA.usages.forEach((usage) => showUsage(usage, byId("memory-view")));
document.documentElement.dataset.ready = "yes";
