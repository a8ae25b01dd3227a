"use strict";
// Sorts a table by the column whose head is pressed; again turns it round. Figures by value, words by alphabet.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, at) => {
    const cell = row.cells[at];
    if (!cell) return [2, 0, ""];
    return cell.dataset.value === undefined ? [1, 0, cell.textContent] : [0, Number(cell.dataset.value), ""];
  };
  heads.forEach((head, at) => {
    head.querySelector("button").addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [key(row, at), row]);
      rows.sort(([a], [b]) => {
        if (a[0] !== b[0]) return a[0] - b[0]; // figures first, gaps last, whichever way round
        const order = a[0] === 0 ? a[1] - b[1] : a[2].localeCompare(b[2], "en", { numeric: true });
        return up ? order : -order;
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
