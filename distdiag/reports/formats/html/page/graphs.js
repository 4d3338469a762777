// The graph of who waits for whom, and the tree of stacks.
function wrap(text, most) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines[lines.length - 1]} ${word}`.trim();
    if (longer.length <= most || !lines[lines.length - 1]) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.flatMap((line) => line.length > most ? line.match(new RegExp(`.{1,${most}}`, "gsu")) : [line]);
}

function showWaits(graph, place) {
  const layers = [...new Set(graph.nodes.map((node) => node.layer))].sort((a, b) => a - b);
  const [width, gap, pad] = [270, 90, 12];
  const filled = layers.map(() => 8);
  const boxes = graph.nodes.map((node) => {
    const lines = [...wrap(node.doing, 40).slice(0, 5), ...(node.place ? wrap(node.place, 40).slice(-2) : [])];
    const column = layers.indexOf(node.layer);
    const height = 28 + 16 * lines.length;
    const box = { x: 8 + column * (width + gap), y: filled[column], height, lines };
    filled[column] += height + 22;
    return box;
  });
  const size = { width: 16 + layers.length * width + (layers.length - 1) * gap, height: Math.max(...filled) + 40 };
  const svg = draw("svg", { width: size.width, height: size.height, role: "img", "aria-label": "Who waits for whom; the list below says the same" });
  const marker = draw("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto" });
  marker.append(draw("path", { d: "M0,0 L8,4 L0,8 z", class: "head" }));
  const defs = draw("defs");
  defs.append(marker);
  svg.append(defs);
  graph.edges.forEach((edge) => {
    const [a, b] = [boxes[edge.source], boxes[edge.target]];
    const forward = b.x > a.x;
    const down = (forward ? 0 : Math.min(14, a.height / 4));
    const [x1, y1] = [forward ? a.x + width : a.x, a.y + a.height / 2 + down];
    const [x2, y2] = [forward ? b.x : b.x + width, b.y + b.height / 2 + down];
    const same = a.x === b.x;
    const bend = same ? `M${a.x + width},${y1} C${a.x + width + 50},${y1} ${a.x + width + 50},${y2} ${b.x + width},${y2}`
      : `M${x1},${y1} C${(x1 + x2) / 2},${y1} ${(x1 + x2) / 2},${y2} ${x2},${y2}`;
    const path = draw("path", { d: bend, class: "edge", "marker-end": "url(#arrow)" });
    path.append(draw("title", {}, edge.text));
    svg.append(path);
  });
  graph.nodes.forEach((node, at) => {
    const box = boxes[at];
    svg.append(draw("rect", { x: box.x, y: box.y, width, height: box.height, rx: 8, class: node.waits ? "box" : "box root" }));
    svg.append(draw("text", { x: box.x + pad, y: box.y + 19, "font-weight": 600 }, wrap(node.ranks, 36)[0] + (wrap(node.ranks, 36).length > 1 ? "…" : "")));
    box.lines.forEach((line, number) => svg.append(draw("text", { x: box.x + pad, y: box.y + 37 + 16 * number, class: "faint" }, line)));
  });
  const list = make("ul");
  graph.edges.forEach((edge) => {
    const [from, to] = [graph.nodes[edge.source], graph.nodes[edge.target]];
    list.append(make("li", { text: `${from.ranks} (${from.doing}) ${from.ranks.startsWith("ranks") ? "wait" : "waits"} for ${to.ranks}, which ${edge.text}` }));
  });
  place.append(make("div", { class: "graph", tabIndex: 0 }, svg), list);
}

function branch(node) {
  const frames = make("ol");
  node.frames.forEach(([name, where, isUser]) => frames.append(make("li", { class: isUser ? "user" : "lib", text: where ? `${name}  ${where}` : name })));
  const many = node.num_ranks === 1 ? "" : ` (${node.num_ranks} ranks)`;
  const item = make("details", { open: true }, make("summary", { text: node.ranks + many }), frames);
  if (node.children.length) item.append(make("ul", {}, ...node.children.map((child) => make("li", {}, branch(child)))));
  return item;
}

function showTrees(trees, place) {
  for (const tree of trees) {
    const isMain = tree.thread === "MainThread";
    const list = make("ul", {}, ...tree.roots.map((root) => make("li", {}, branch(root))));
    place.append(make("details", { class: "tree", open: isMain }, make("summary", { text: `${tree.thread} of ${tree.num_ranks} rank${tree.num_ranks === 1 ? "" : "s"}` }), list));
  }
}

if (DATA.waits) showWaits(DATA.waits, byId("waits-view"));
if (DATA.trees?.length) showTrees(DATA.trees, byId("stacks-view"));
