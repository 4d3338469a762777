// What each rank called in a process group, number by number.
function showMatrix(matrix, place) {
  place.replaceChildren();
  const verdict = matrix.first < 0
    ? `All ${matrix.total} recorded collectives agree on the ranks that are here; the last ones are shown.`
    : `The ranks first differ at #${matrix.first}.`;
  place.append(make("p", { class: "hint", text: `${verdict} Group ${matrix.group}: ${matrix.num_ranks} ranks, ${matrix.backend || "backend not known"}.` }));
  const head = make("tr", {}, make("th", { scope: "col", text: "#" }));
  matrix.columns.forEach((ranks) => head.append(make("th", { scope: "col", text: ranks })));
  const body = make("tbody");
  for (const row of matrix.rows) {
    const line = make("tr", { class: row.number === matrix.first ? "first" : "" }, make("th", { scope: "row", text: row.number }));
    for (const cell of row.cells) {
      line.append(make("td", { class: cell.is_odd ? "odd" : "" }, cell.text,
        make("span", { class: "at", text: [cell.place, cell.state].filter(Boolean).join(", ") })));
    }
    body.append(line);
  }
  const box = make("div", { class: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, head), body));
  place.append(box);
  const first = body.querySelector("tr.first");
  if (first) box.scrollTop = Math.max(0, first.offsetTop - 160);
}

if (DATA.matrices?.length) {
  const place = byId("matrix-view");
  const view = make("div");
  if (DATA.matrices.length > 1) {
    const choice = make("select", { id: "group" });
    DATA.matrices.forEach((matrix, at) => choice.append(make("option", { value: at, text: `${matrix.group} (${matrix.num_ranks} ranks)${matrix.first < 0 ? "" : `, differs at #${matrix.first}`}` })));
    choice.addEventListener("change", () => showMatrix(DATA.matrices[choice.value], view));
    place.append(make("label", {}, "Process group ", choice));
  }
  place.append(view);
  showMatrix(DATA.matrices[0], view);
}
