// Sorts a table by the column whose heading is pressed; copies what is to be copied. The page is whole without it.
for (const table of document.querySelectorAll("table")) {
  const value = (row, at) => {
    const text = row.cells[at]?.textContent.trim() ?? "";
    const figure = parseFloat(text.replaceAll(",", ""));
    return text === "" ? null : Number.isNaN(figure) ? text : figure;
  };
  for (const head of table.querySelectorAll("th")) {
    const sort = () => {
      const down = head.ariaSort === "ascending", at = head.cellIndex, body = table.tBodies[0];
      for (const other of table.querySelectorAll("th")) other.ariaSort = null;
      head.ariaSort = down ? "descending" : "ascending";
      const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
      body.append(...[...body.rows].sort((one, other) => {
        const [a, b] = [value(one, at), value(other, at)];
        return a === null || b === null ? (a === null) - (b === null) : (down ? -1 : 1) * order(a, b);
      }));
    };
    if (!head.textContent) continue;
    head.classList.add("sorts");
    head.tabIndex = 0;
    head.onclick = sort;
    head.onkeydown = (event) => event.key === "Enter" && sort();
  }
}
for (const text of document.querySelectorAll("pre.copy")) {
  const copied = text.textContent, button = document.createElement("button");
  button.textContent = "copy";
  button.onclick = async () => {
    await navigator.clipboard.writeText(copied);
    button.textContent = "copied";
  };
  text.prepend(button);
}
