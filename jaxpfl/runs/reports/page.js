"use strict";
// Sorts a table by the column whose heading is pressed: numbers by data-key, words by themselves, gaps last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const numeric = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const falling = before ? before === "ascending" : numeric;
    const sign = falling ? -1 : 1;
    const key = (row) => numeric ? row.cells[column].dataset.key : row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return sign * (numeric ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    });
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
}
