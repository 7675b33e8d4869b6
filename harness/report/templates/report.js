"use strict";
(() => {
  const told = document.getElementById("sorted");
  const keyOf = (row, column) => {
    const text = row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const number = text === "inf" ? Infinity : text === "nan" ? Infinity : Number(text);
    return text.trim() === "" || Number.isNaN(number) ? text.toLowerCase() : number;
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? (a < b ? -1 : a > b ? 1 : 0) : String(a).localeCompare(String(b)));
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const button of table.tHead.querySelectorAll("button")) {
      button.addEventListener("click", () => {
        const heading = button.closest("th");
        const first = heading.classList.contains("figure") ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = heading.getAttribute("aria-sort") === first ? other : first;
        for (const each of table.tHead.querySelectorAll("th[aria-sort]")) each.setAttribute("aria-sort", "none");
        heading.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row, heading.cellIndex), row]);
        rows.sort((a, b) => sign * compare(a[0], b[0]));
        table.tBodies[0].append(...rows.map((each) => each[1]));
        told.textContent = `sorted by ${button.textContent}, ${order}`;
      });
    }
  }
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
  const unfold = () => {
    const target = location.hash.startsWith("#failure-") && document.getElementById(location.hash.slice(1));
    if (target) target.open = true;
  };
  addEventListener("hashchange", unfold);
  addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details.failure, details.failure details:has(img)")) each.open = true; });
  unfold();
})();
